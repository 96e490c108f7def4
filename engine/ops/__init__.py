"""Operators. The file name is the backend; every file has the same functions, and reference.py specifies them.

A backend is chosen once, by `load`, and handed to the model. Nothing outside this folder asks which one it is.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from engine.ops import native
from twinpool.errors import ConfigError

BACKENDS = ("cpu", "reference")

_log = logging.getLogger(__name__)


def load(name: str) -> ModuleType:
    """The operators of backend `name`. Raises ConfigError for a name that is not in BACKENDS.

    Where the native kernels were not built, "cpu" is the reference, and the log says so.
    """
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}", field="backend")
    if name == "cpu" and native.library() is None:
        _log.warning(
            "NATIVE CPU KERNELS ARE MISSING: running on plain torch, many times slower, and a request's tokens may "
            "depend on what shares its batch. Install a C++ compiler (g++), then reinstall twinpool."
        )
        name = "reference"
    return importlib.import_module(f"engine.ops.{name}")
