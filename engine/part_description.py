"""A part of a model as JSON beside its tensors, and back: dataclasses of this package, and what they hold.

Classes are found by name among those of engine.* that are loaded, and only dataclasses: a description can build parts
of models and nothing else.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies."""

    begin: int  # bytes from the file's start
    dtype: str  # torch's name
    shape: tuple[int, ...]


def describe(value: Any, write: Callable[[torch.Tensor], Place], given: Mapping[str, Any]) -> Any:
    """What `build` makes an equal value of. write: puts a tensor somewhere; given: values to be named, not described.

    Raises TypeError for what is no dataclass of engine.*, tensor, dtype, list, tuple, dict, number or text.
    """
    for name, known in given.items():
        if value is known or (isinstance(value, str) and value == known):
            return {"given": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": dataclasses.astuple(write(value))}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [describe(each, write, given) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[describe(each, write, given) for each in item] for item in value.items()]}
    cls = type(value)
    if not dataclasses.is_dataclass(cls) or cls is not _class(f"{cls.__module__}:{cls.__qualname__}"):
        raise TypeError(f"{cls.__module__}.{cls.__qualname__} is no dataclass of the engine")
    fields = {
        field.name: describe(getattr(value, field.name), write, given)
        for field in dataclasses.fields(cls)
        if field.init
    }
    return {"is": f"{cls.__module__}:{cls.__qualname__}", "of": fields}


def build(description: Any, tensor: Callable[[Place], torch.Tensor], given: Mapping[str, Any]) -> Any:
    """The value of a description. tensor: what lies at a place."""
    if not isinstance(description, dict):
        return description
    if "given" in description:
        return given[description["given"]]
    if "tensor" in description:
        begin, dtype, shape = description["tensor"]
        return tensor(Place(begin, dtype, tuple(shape)))
    if "dtype" in description:
        return getattr(torch, description["dtype"])
    if "list" in description:
        return [build(each, tensor, given) for each in description["list"]]
    if "tuple" in description:
        return tuple(build(each, tensor, given) for each in description["tuple"])
    if "dict" in description:
        return {build(key, tensor, given): build(each, tensor, given) for key, each in description["dict"]}
    fields = {name: build(each, tensor, given) for name, each in description["of"].items()}
    return _class(description["is"])(**fields)


def _class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found = getattr(sys.modules.get(module), qualname, None) if module.startswith("engine.") else None
    if not dataclasses.is_dataclass(found):
        raise TypeError(f"{name} is no dataclass of the engine")
    return found
