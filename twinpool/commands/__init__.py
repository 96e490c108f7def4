"""The subcommands of `twinpool`: each module has `add_parser`, which says its arguments, and `run`, which does it."""
