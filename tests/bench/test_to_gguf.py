"""GGUF files rewritten for llama.cpp hold the weights that we make of the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file

from bench.to_gguf import rewrite
from engine.convert import convert_gguf
from tests import tiny_models
from tests.engine.test_convert import write_gguf


@pytest.mark.parametrize("twice", [False, True])
def test_a_rewritten_file_converts_to_the_same_weights(twice: bool, tmp_path: Path) -> None:
    original = tiny_models.make(tmp_path / "original", torch_dtype="bfloat16")
    source = write_gguf(tmp_path / "m.gguf", original, qtype=Type.Q8_0, twice=twice)
    rewrite(source, tmp_path / "bf16.gguf", Type.BF16)
    for path in (source, tmp_path / "bf16.gguf"):
        convert_gguf(path, tmp_path / f"{path.stem}-converted")
    expected, actual = (load_file(tmp_path / f"{name}-converted" / "model.safetensors") for name in ("m", "bf16"))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_q8_0_is_made_of_the_bf16_weights(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny_models.make(tmp_path / "original", torch_dtype="bfloat16"))
    for kind in (Type.BF16, Type.Q8_0):
        rewrite(source, tmp_path / f"{kind.name}.gguf", kind)
    exact, rounded = (
        {each.name: each for each in GGUFReader(tmp_path / f"{kind.name}.gguf").tensors}
        for kind in (Type.BF16, Type.Q8_0)
    )
    assert rounded.keys() == exact.keys()
    for name, tensor in rounded.items():
        values = dequantize(exact[name].data, exact[name].tensor_type)
        assert tensor.tensor_type == (Type.F32 if values.ndim == 1 else Type.Q8_0)
        error = np.abs(dequantize(tensor.data, tensor.tensor_type) - values).max()
        assert error <= np.abs(values).max() / 127 / 2 * 1.01
