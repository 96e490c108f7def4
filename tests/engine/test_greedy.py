"""Greedy answers of the real model against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache

from engine.engine import Engine
from tests.engine.running import greedy

MAX_TOKENS = 64
# Answers whose tokens lead by 0.02 logits or more all the way: with a bf16 cache, the order of fp32 sums decides now
# and then to which neighbour a key or value rounds, which can turn a nearer tie (seen at 0.004, in 3 of 30 prompts).
PROMPTS = (
    "The capital of France is",
    "To be, or not to be, that is the question:",
    "A recipe for tomato soup:\n1.",
    "In 1969, the first humans",
    "The difference between a list and a tuple in Python is",
    "Dear Sir or Madam,\n\nI am writing to",
    "The human heart has",
    "Question: What is 2 + 2?\nAnswer:",
    "Dogs are",
    "A prime number is",
)


class Bf16Cache(DynamicCache):
    """K and V rounded to bf16 and computed on in fp32: what kv_dtype bf16 means in an fp32 model."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        rounded = (states.bfloat16().float() for states in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


@pytest.fixture(scope="module")
def oracle(model_dir: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kv_dtype", "cache_class"), [("fp32", DynamicCache), ("bf16", Bf16Cache)])
def test_64_greedy_tokens_of_ten_prompts_equal_transformers(
    model_dir: Path, oracle, kv_dtype: str, cache_class
) -> None:
    """The oracle reads prompt and answer at once: its likeliest token after every prefix of ours must be our next one,
    which by induction is what its own greedy search yields."""
    engine = Engine.load(model_dir, dtype="fp32", kv_dtype=kv_dtype, memory_bytes=256 << 20)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    answers = greedy(engine, prompts, MAX_TOKENS)
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        with torch.inference_mode():
            cache = cache_class(config=oracle.config)
            logits = oracle(torch.tensor([prompt + answer]), cache=cache, use_cache=True).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist(), f"differs for {text!r}"
    assert tokenizer.decode(answers[0]).strip().startswith("Paris")
