"""Models in bf16, as they are served, against the fp32 model: no further from it than transformers' in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests import tiny_models
from tests.engine.running import logits_in_chunks
from tests.engine.test_models import load, oracle_logits, prompt


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3", "deepseek-v4", "deepseek-v4-pro"])
def test_rounding_to_bf16_costs_no_more_than_in_transformers(tmp_path: Path, kind: str) -> None:
    ours, theirs = [], []
    for seed in range(6):
        path, token_ids = tiny_models.make(tmp_path / str(seed), kind, seed=seed), prompt(60, seed)
        exact = oracle_logits(path, token_ids)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        with torch.inference_mode():
            peer = model(torch.tensor([token_ids])).logits[0].float()
        engine = load(path, dtype="bf16", kv_dtype="bf16")
        ours.append((logits_in_chunks(engine, token_ids, [60]) - exact).abs().median(-1).values)
        theirs.append((peer - exact).abs().median(-1).values)
    mine, peers = (float(torch.cat(errors).median()) for errors in (ours, theirs))
    print(f"{kind}: {mine:.4f}, transformers {peers:.4f}")
    assert 0 < mine < 1.25 * peers
