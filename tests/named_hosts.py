"""python -m tests.named_hosts PROCESS OPTIONS...: a process that knows names from the file HOSTS.

HOSTS is the path of a JSON object, NAME to a list of addresses, read at every look-up: it may be changed meanwhile.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from service.config import run_main

_real = socket.getaddrinfo


def _look_up(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
    addresses = json.loads(Path(os.environ["HOSTS"]).read_text()).get(host)
    if addresses is None:
        return _real(host, port, *args, **kwargs)
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]


if __name__ == "__main__":
    socket.getaddrinfo = _look_up
    process = sys.argv.pop(1)
    run_main(importlib.import_module(f"{process}.__main__").main, process)
