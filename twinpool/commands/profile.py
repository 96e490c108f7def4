"""twinpool profile: where the time of a step goes. All arguments go to `python -m bench.profile`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from twinpool.child import module_command, module_environment


def add_parser(commands: Any) -> None:
    """Only for the list of commands: launch.py hands the arguments over before they are parsed here."""
    commands.add_parser("profile", help="where a step's time goes (arguments: twinpool profile --help)", add_help=False)


def run(arguments: Sequence[str]) -> int:
    return subprocess.run(module_command("bench.profile", *arguments), env=module_environment(), check=False).returncode
