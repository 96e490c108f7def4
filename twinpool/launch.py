"""The `twinpool` command.

Every failure ends in one line on stderr and a status: 2 when what was asked for is wrong, else 1; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from twinpool import __version__
from twinpool.commands import bench, chat, convert, demo, drain, explain, generate, models, pools, profile, tokenize, up
from twinpool.errors import ConfigError, InvalidRequest, TwinpoolError, UnknownModel

COMMANDS = (up, demo, chat, generate, pools, explain, drain, models, tokenize, convert, bench, profile)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["bench"]:
            return bench.run(arguments[1:])
        if arguments[:1] == ["profile"]:
            return profile.run(arguments[1:])
        args = _parser().parse_args(arguments)
        return int(args.run(args))
    except TwinpoolError as error:
        print(f"twinpool: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InvalidRequest | UnknownModel) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains while it exits
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinpool", description="Serves language models with prefill and decode in separate pools."
    )
    parser.add_argument("--version", action="version", version=f"twinpool {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    version = commands.add_parser("version", help="the version of this program")
    version.set_defaults(run=_version)
    return parser


def _version(_args: argparse.Namespace) -> int:
    print(f"twinpool {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
