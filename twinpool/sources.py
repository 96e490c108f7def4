"""Which sources a native library was built from, so that no other code calls it: setup.py and the loaders ask the same.

digest(Path("engine/ops/csrc"))   # "5f1d0c..." of 32 digits
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_SUFFIXES = (".cpp", ".h", ".inl")


def digest(folder: Path) -> str:
    """Of the C++ files in `folder`, their names included."""
    hashed = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES:
            hashed.update(f"{path.name} {path.stat().st_size}\n".encode())
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:32]
