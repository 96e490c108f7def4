"""Models with experts and with latents in real processes: the text is that of one process, one request at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import tiny_models
from tests.flow.cluster import open_cluster
from tests.flow.oracle import Oracle
from tests.flow.test_answers import prompts


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3"])
def test_answers_through_the_pools_are_token_identical_to_one_process(tmp_path: Path, kind: str) -> None:
    model = tiny_models.make(tmp_path / kind, kind)
    oracle, together = Oracle(model), prompts(12, seed=1, high=200)
    for cluster in open_cluster(tmp_path, model, 1, 1):
        with cluster.client() as client, ThreadPoolExecutor(6) as threads:
            answers = list(
                threads.map(lambda p: client.generate(p, max_tokens=16, temperature=0, ignore_eos=True), together)
            )
        for prompt, answer in zip(together, answers, strict=True):
            assert answer.token_ids == oracle.answer(prompt, 16, ignore_eos=True)
        cluster.assert_baseline()
