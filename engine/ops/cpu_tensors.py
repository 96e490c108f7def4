"""Checks of what goes to the native kernels: dtypes, shapes and strides that they can read."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
CODES = {torch.float32: 0, torch.bfloat16: 1}  # as Dtype of kernels.h


def operator(function: Callable[P, R]) -> Callable[P, R]:
    """Names the operator in what its checks say: callers know a model's layers, not which of them took what."""

    @wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as exc:
            if "operator " in str(exc):  # of an operator that this one uses
                raise
            raise type(exc)(f"operator {function.__name__}: {exc}") from exc

    return named


def dtype_code(x: torch.Tensor, name: str) -> int:
    code = CODES.get(x.dtype)
    if code is None or not x.is_cpu:
        raise TypeError(f"{name} must be bfloat16 or float32 on the CPU, not {x.dtype} on {x.device}")
    return code


def check_tensor(x: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.dtype != dtype or not x.is_cpu:
        raise TypeError(f"{name} must be {dtype} on the CPU, not {x.dtype} on {x.device}")
    if x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(x.shape)}")


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x itself if its last axis is dense, as the kernels want it, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
