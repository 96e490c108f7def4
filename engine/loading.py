"""Reads the weights of a Hugging Face directory: one safetensors file or shards, tensor by tensor, digest taken."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from engine.dequantize import FP8_BLOCK, SCALE_DTYPES, fp8_scales_shape, from_fp8, from_mxfp4, mxfp4_shapes
from twinpool.errors import ConfigError

MAPPED_BYTES = 64 << 20  # of the files, that are kept in memory beside the tensor that is being read
FLOAT_DTYPES = {"BF16", "F16", "F32"}
INTEGER_DTYPES = {"I64", "I32", "I16"}
FP8_DTYPE, FP4_DTYPES = "F8_E4M3", {"I8", "U8"}


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies: under another name, or as `part` of a tensor of the shape `whole`."""

    name: str
    whole: tuple[int, ...] = ()
    part: tuple[int | slice, ...] = ()


class Checkpoint:
    """The tensors of a model directory. Nothing is read before `take`.

    Files are mapped into memory, and what was read stays with the process until the mapping is gone: after every
    MAPPED_BYTES the files are mapped anew, or a worker would hold the whole checkpoint beside its own weights.
    """

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigError when files are missing or no safetensors."""
        self.model_dir = model_dir
        self._find: Callable[[str], Stored] = Stored
        self._path_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._mapped = [0]  # bytes read from what is open; shared with those that `renamed` makes, as is the next
        self._taken: set[str] = set()  # names of what was asked for
        for path in _weight_files(model_dir):
            file = self._open[path] = _opened(path)
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                self._path_of[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self._path_of

    @property
    def names(self) -> Iterable[str]:
        return self._path_of.keys()

    def where(self, name: str) -> str:
        """File, name and shape of a tensor, for messages."""
        return f"{self._path_of[name]}: tensor {name} {self._file(name).get_slice(name).get_shape()}"

    def untaken(self, layer: int) -> list[str]:
        """Names of a layer's tensors that nobody asked for: the config.json knows of no such part."""
        beginning = re.compile(rf"(?:model\.)?layers\.{layer}\.")
        return [name for name in self._path_of if name not in self._taken and beginning.match(name)]

    def renamed(self, find: Callable[[str], Stored]) -> Checkpoint:
        """The same files, whose tensors `take` finds where `find` says."""
        other = copy.copy(self)
        other._find = find
        return other

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A copy of tensor `name` in `dtype`; fp8 and fp4 in blocks are dequantized.

        Raises ConfigError when it is missing, of another shape or of a type that is not supported.
        """
        at = self._find(name)
        name = at.name
        stored = self._dtype(name, shape)
        scale = next((each for each in _scale_names(name) if each in self), None)
        self._taken.update(() if scale is None else (scale,))
        if scale is not None and not at.part:
            if stored == FP8_DTYPE:
                self._check_shape(name, shape)
                return from_fp8(self._tensor(name), self._scales(scale, fp8_scales_shape(shape))).to(dtype)
            if stored in FP4_DTYPES and len(shape) == 2:
                codes_shape, scales_shape = mxfp4_shapes(shape)
                self._check_shape(name, codes_shape)
                return from_mxfp4(self._tensor(name), self._scales(scale, scales_shape)).to(dtype)
        self._check_shape(name, at.whole or shape)
        if stored not in FLOAT_DTYPES:
            raise ConfigError(
                f"{self._path_of[name]}: tensor {name} {list(at.whole or shape)} is {stored}; supported are bf16, "
                f"fp16, fp32, fp8 (e4m3) beside {' or '.join(_scale_names(name))} in blocks of {FP8_BLOCK}, and fp4 in "
                "bytes beside the latter"
            )
        if at.part:
            part: torch.Tensor = self._file(name).get_slice(name)[at.part]
            self._count(part)
            return part.to(dtype, copy=True)
        return self._tensor(name).to(dtype, copy=True)

    def take_integers(self, name: str, shape: Sequence[int], limit: int) -> torch.Tensor:
        """int32 of a table of integers from 0 to below `limit`. Raises ConfigError like `take`."""
        name = self._find(name).name
        stored = self._dtype(name, shape)
        self._check_shape(name, shape)
        if stored not in INTEGER_DTYPES:
            raise ConfigError(f"{self._path_of[name]}: tensor {name} {list(shape)} is {stored}, it must hold integers")
        table = self._tensor(name)
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < limit:
            raise ConfigError(
                f"{self._path_of[name]}: tensor {name} {list(shape)} holds {int(table.min())} to {int(table.max())}, "
                f"config.json implies 0 to {limit - 1}"
            )
        return table.to(torch.int32, copy=True)

    def _file(self, name: str) -> Any:
        path = self._path_of[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path]

    def _tensor(self, name: str) -> torch.Tensor:
        """Mapped for as long as it lives; not to be kept."""
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        self._count(tensor)
        return tensor

    def _count(self, read: torch.Tensor) -> None:
        self._mapped[0] += read.nbytes
        if self._mapped[0] > MAPPED_BYTES:
            self._mapped[0] = 0
            self._open.clear()  # a mapping goes with the last tensor on it

    def _dtype(self, name: str, shape: Sequence[int]) -> str:
        if name not in self._path_of:
            raise ConfigError(
                f"{self.model_dir}: tensor {name} is missing from the safetensors files, config.json implies one of "
                f"shape {list(shape)}"
            )
        self._taken.add(name)
        return self._file(name).get_slice(name).get_dtype()

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        found = self._file(name).get_slice(name).get_shape()
        if found != list(shape):
            raise ConfigError(
                f"{self._path_of[name]}: tensor {name} has shape {found}, config.json implies {list(shape)}"
            )

    def _scales(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        stored = self._dtype(name, shape)
        self._check_shape(name, shape)
        if stored not in SCALE_DTYPES:
            raise ConfigError(
                f"{self._path_of[name]}: tensor {name} {list(shape)} is {stored}; scales must be e8m0 or fp32"
            )
        return self._tensor(name)

    def digest(self) -> str:
        """XXH3-128 over every tensor's name, dtype, shape and bytes, however they are spread over files."""
        hasher = xxhash.xxh3_128()
        for name in sorted(self._path_of):
            view = self._file(name).get_slice(name)
            hasher.update(f"{name} {view.get_dtype()} {view.get_shape()};".encode())
            tensor = self._tensor(name)
            hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return hasher.hexdigest()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}; fetch the file again") from exc


def _scale_names(name: str) -> tuple[str, ...]:
    """What may hold the scales of tensor `name`."""
    return f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale"


def _weight_files(model_dir: Path) -> list[Path]:
    index, places = model_dir / "model.safetensors.index.json", {}
    if index.exists():
        try:
            places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            names = sorted(set(places.values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
            raise ConfigError(f"cannot read {index}: {exc!r}; fetch the file again") from exc
        if strangers := [name for name in names if not isinstance(name, str) or name != Path(name).name]:
            raise ConfigError(f"{index} names {strangers[0]!r}, which is no file of this directory")
        paths = [model_dir / name for name in names]
    else:
        paths = [model_dir / "model.safetensors"]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        lost = sorted(name for name, file in places.items() if file in missing)
        among = f" ({len(lost)} tensors by {index.name}, tensor {lost[0]} among them)" if lost else ""
        raise ConfigError(
            f"{model_dir} lacks {', '.join(missing)}{among}: a model directory needs model.safetensors, or "
            "model.safetensors.index.json with all the shards it names (a GGUF file: see `twinpool convert`)"
        )
    return paths
