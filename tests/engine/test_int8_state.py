"""INT8 state against bf16 state, for models that choose: experts, and entries to attend to.

A choice between near equals falls differently for any rounding, bf16 against fp32 included, and in a model of a few
layers with weights of equal size one such choice is most of the answer. Published models are not like that: what a
layer adds is small beside what it adds to, the smaller the deeper the model, as depth-scaled initialisation starts out
(GPT-2: matrices that write to the residuals times (2 * layers) ** -0.5, embeddings of unit size). So do these, with
the scale of 16 layers; published models of these families have 43 to 94.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_models
from tests.engine.running import logits_in_chunks
from tests.engine.test_models import load, prompt

MOST_MEAN_KL = 2e-3
LAYERS = 16
_WRITING = ("o_proj.weight", "down_proj.weight", "wo_b.weight", "w2.weight")
_EMBEDDINGS = ("embed_tokens.weight", "embed.weight")
# A token attends to 4 entries in the smallest configuration, to 16 here: of 37 at most, where published models take
# 512 of 32,768 and all of the first 512.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {},
    "deepseek-v3": {},
    "deepseek-v4": {"index_topk": 16},
    "deepseek-v4-pro": {"index_topk": 16},
}


def as_deep_as(path: Path, layers: int) -> Path:
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(_WRITING):
            weights[name] = (weight.float() * (2 * layers) ** -0.5).to(weight.dtype)
        elif name.endswith(_EMBEDDINGS):
            weights[name] = (weight.float() / weight.float().std()).to(weight.dtype)
    save_file(weights, path / "model.safetensors")
    return path


# initializer_range of published config.json and the hidden size that it is for.
PUBLISHED = {"qwen3-moe": (0.02, 4096), "deepseek-v3": (0.006, 7168)}


def initialised(path: Path, std: float) -> Path:
    """Normal matrices of one std and norms of one, as models of these families are initialised."""
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            weights[name] = (weight.float() * (std / weight.float().std())).to(weight.dtype)
        elif name.endswith("norm.weight"):
            weights[name] = torch.ones_like(weight)
    save_file(weights, path / "model.safetensors")
    return path


def divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Mean KL of tokens, in nats."""
    expected, got = expected.log_softmax(-1), got.log_softmax(-1)
    return float((expected.exp() * (expected - got)).sum(-1).mean())


@pytest.mark.parametrize("kind", SIZES)
def test_int8_state_stays_close_to_bf16(tmp_path: Path, kind: str) -> None:
    token_ids = prompt(150)
    for seed in range(3):
        path = as_deep_as(tiny_models.make(tmp_path / str(seed), kind, seed=seed, **SIZES[kind]), LAYERS)
        bf16, int8 = (load(path, kv_dtype=kv_dtype) for kv_dtype in ("bf16", "int8"))
        expected = logits_in_chunks(bf16, token_ids, [150])
        found = divergence(expected, logits_in_chunks(int8, token_ids, [150]))
        assert 0 < found < MOST_MEAN_KL
        # The state matters: another one, of the same tokens behind another beginning, is far off.
        other = logits_in_chunks(bf16, prompt(75, seed=9) + token_ids[75:], [150])
        matters = divergence(expected[75:], other[75:])
        print(f"{kind} {seed}: {found:.1e}, another beginning {matters:.1e}")  # for bench/README.md, with -s
        assert matters > max(5 * MOST_MEAN_KL, 50 * found)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_int8_state_stays_close_at_the_gain_of_published_initialisation(tmp_path: Path, kind: str) -> None:
    """A matrix gives its input the gain std * hidden ** 0.5, which is what stays the same in a small model."""
    token_ids, (std, hidden) = prompt(150), PUBLISHED[kind]
    for seed in range(3):
        path = tiny_models.make(tmp_path / str(seed), kind, seed=seed)
        initialised(path, std * (hidden / 64) ** 0.5)
        bf16, int8 = (load(path, kv_dtype=kv_dtype) for kv_dtype in ("bf16", "int8"))
        expected = logits_in_chunks(bf16, token_ids, [150])
        found = divergence(expected, logits_in_chunks(int8, token_ids, [150]))
        other = logits_in_chunks(bf16, prompt(75, seed=9) + token_ids[75:], [150])
        matters = divergence(expected[75:], other[75:])
        print(f"{kind} {seed}: {found:.1e}, another beginning {matters:.1e}")  # for bench/README.md, with -s
        assert 0 < found < MOST_MEAN_KL
        assert matters > max(5 * MOST_MEAN_KL, 50 * found)
