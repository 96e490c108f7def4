"""Flags for the options of a request, shared by `generate` and `chat`."""

from __future__ import annotations

import argparse
from typing import Any, cast

from twinpool.options import RequestOptions

# name, type, what it is; defaults are the server's
_FLAGS: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "most tokens of the answer [default: what the model's context leaves]"),
    ("min_tokens", int, "fewest tokens of the answer"),
    ("temperature", float, "0 (greedy) to 2 [default 1]"),
    ("top_p", float, "over 0 to 1 [default 1]"),
    ("top_k", int, "candidates kept; 0 is off [default 0]"),
    ("min_p", float, "0 to 1 [default 0]"),
    ("repetition_penalty", float, "over 0; 1 is off [default 1]"),
    ("presence_penalty", float, "-2 to 2 [default 0]"),
    ("frequency_penalty", float, "-2 to 2 [default 0]"),
    ("seed", int, "same seed, same answer"),
    ("model", str, "a name from `twinpool models` [default: the only one]"),
    ("sla_class", str, "a class of the router's configuration"),
    ("priority", int, "higher goes first within the class [default 0]"),
    ("ttft_target_ms", float, "milliseconds to the first token [default: the class's]"),
    ("tpot_target_ms", float, "milliseconds between tokens [default: the class's]"),
    ("tenant", str, "whose share of the queue it takes"),
    ("deadline_s", float, "seconds until the last token"),
)


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the request")
    for name, kind, help_text in _FLAGS:
        group.add_argument("--" + name.replace("_", "-"), type=kind, help=help_text, default=argparse.SUPPRESS)
    group.add_argument("--stop", action="append", default=argparse.SUPPRESS, help="ends the answer; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on past the end token")


def request_options(args: argparse.Namespace) -> RequestOptions:
    """The options that were given on the command line, and no other."""
    names = [name for name, _, _ in _FLAGS] + ["stop", "ignore_eos", "n", "logprobs", "echo"]
    return cast(RequestOptions, {name: getattr(args, name) for name in names if hasattr(args, name)})
