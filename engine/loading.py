"""Reads the weights of a Hugging Face directory: one safetensors file or shards, mapped into memory, digest taken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from twinpool.errors import ConfigError

FLOAT_DTYPES = {"BF16", "F16", "F32"}
FP8_DTYPE, FP8_BLOCK = "F8_E4M3", 128  # rows and columns that share a scale


class Checkpoint:
    """The tensors of a model directory. Nothing is read before `take`; pages come from the mapped files."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigError when files are missing or no safetensors."""
        self.model_dir = model_dir
        self._file_of = {}
        self._path_of: dict[str, Path] = {}
        for path in _weight_files(model_dir):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as exc:
                raise ConfigError(f"cannot read {path}: {exc}; fetch the file again") from exc
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                self._file_of[name], self._path_of[name] = file, path

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A copy of tensor `name` in `dtype`; fp8 in blocks is dequantized.

        Raises ConfigError when it is missing, of another shape or of a type that is not supported.
        """
        self._check_shape(name, shape)
        stored = self._file_of[name].get_slice(name).get_dtype()
        if stored == FP8_DTYPE and f"{name}_scale_inv" in self:
            return self._dequantize(name, shape).to(dtype)
        if stored not in FLOAT_DTYPES:
            raise ConfigError(
                f"{self._path_of[name]}: tensor {name} {list(shape)} is {stored}; supported are bf16, fp16, fp32, and "
                f"fp8 (e4m3) beside {name}_scale_inv in blocks of {FP8_BLOCK}"
            )
        return self._file_of[name].get_tensor(name).to(dtype, copy=True)

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        if name not in self._file_of:
            raise ConfigError(
                f"{self.model_dir}: tensor {name} is missing from the safetensors files, config.json implies one of "
                f"shape {list(shape)}"
            )
        found = self._file_of[name].get_slice(name).get_shape()
        if found != list(shape):
            raise ConfigError(
                f"{self._path_of[name]}: tensor {name} has shape {found}, config.json implies {list(shape)}"
            )

    def _dequantize(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """fp32 of fp8 codes [rows, columns] with one scale a square block, as DeepSeek-V3 is published."""
        blocks = [-(-size // FP8_BLOCK) for size in shape]
        self._check_shape(f"{name}_scale_inv", blocks)
        scales = self._file_of[f"{name}_scale_inv"].get_tensor(f"{name}_scale_inv").float()
        rows, columns = (scales.new_tensor(range(size)).long() // FP8_BLOCK for size in shape)
        return self._file_of[name].get_tensor(name).float() * scales[rows][:, columns]

    def digest(self) -> str:
        """XXH3-128 over every tensor's name, dtype, shape and bytes, however they are spread over files."""
        hasher = xxhash.xxh3_128()
        for name in sorted(self._file_of):
            view = self._file_of[name].get_slice(name)
            hasher.update(f"{name} {view.get_dtype()} {view.get_shape()};".encode())
            tensor = self._file_of[name].get_tensor(name)
            hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return hasher.hexdigest()


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
            raise ConfigError(f"cannot read {index}: {exc!r}; fetch the file again") from exc
        if strangers := [name for name in names if not isinstance(name, str) or name != Path(name).name]:
            raise ConfigError(f"{index} names {strangers[0]!r}, which is no file of this directory")
        paths = [model_dir / name for name in names]
    else:
        paths = [model_dir / "model.safetensors"]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{model_dir} lacks {', '.join(missing)}: a model directory needs model.safetensors, or "
            "model.safetensors.index.json with all the shards it names (a GGUF file: see `twinpool convert`)"
        )
    return paths
