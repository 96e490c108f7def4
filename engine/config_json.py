"""Checked values of a config.json: each is of its type and in its range, or a ConfigError names the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinpool.errors import ConfigError


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """config[key], a positive integer; the default where it is missing or null."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}, it must be a positive integer")
    return value


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """config[key], finite and over 0; the default where it is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {key} is {value!r}, it must be a number over 0")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {value!r}, it must be true or false")
    return value


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(f"{path} is missing: is {path.parent} a Hugging Face model directory?") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content
