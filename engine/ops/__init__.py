"""Operators. The file name is the backend; every file has the same functions, and reference.py specifies them.

A backend is chosen once, by `load`, and handed to the model. Nothing outside this folder asks which one it is.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from twinpool.errors import ConfigError

BACKENDS = ("cpu", "reference")


def load(name: str) -> ModuleType:
    """The operators of backend `name`. Raises ConfigError for a name that is not in BACKENDS."""
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}", field="backend")
    return importlib.import_module(f"engine.ops.{name}")
