"""Models with experts and with latents in real processes: the text is that of one process, one request at a time."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import tiny_models
from tests.flow.cluster import Cluster, open_cluster
from tests.flow.oracle import Oracle
from tests.flow.test_answers import prompts


def assert_answers(cluster: Cluster, oracle: Oracle, together: list[list[int]]) -> set[str]:
    """Returns how they were served."""
    with cluster.client() as client, ThreadPoolExecutor(6) as threads:
        answers = list(
            threads.map(lambda p: client.generate(p, max_tokens=16, temperature=0, ignore_eos=True), together)
        )
    for prompt, answer in zip(together, answers, strict=True):
        assert answer.token_ids == oracle.answer(prompt, 16, ignore_eos=True)
    return {answer.timeline.mode for answer in answers}


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3", "deepseek-v4"])
def test_answers_are_token_identical_to_one_process_also_after_the_loss_of_their_decode_worker(
    tmp_path: Path, kind: str
) -> None:
    """What the lost worker remembered of the sequence is computed again, from the prompt and the answer so far."""
    model = tiny_models.make(tmp_path / kind, kind)
    oracle, together, prompt = Oracle(model), prompts(8, seed=1, high=200), list(range(20, 90))
    for cluster in open_cluster(tmp_path, model, 1, 2):
        assert_answers(cluster, oracle, together)
        cluster.assert_baseline()
        with cluster.client(timeout_s=60) as client:
            with client.stream(prompt, max_tokens=300, temperature=0, ignore_eos=True) as stream:
                chunks = iter(stream)
                tokens = list(next(chunks).token_ids)
                while len(tokens) < 10:
                    tokens += next(chunks).token_ids
                busy = [name for name in ("decode-0", "decode-1") if running(cluster, name)]
                assert len(busy) == 1
                cluster.processes[busy[0]].kill()
                for chunk in chunks:
                    tokens += chunk.token_ids
                timeline = stream.timeline
        assert tokens == oracle.answer(prompt, 300, ignore_eos=True)
        assert timeline.attempts == 2
        assert timeline.decode_worker not in busy
        cluster.assert_baseline()


@pytest.mark.slow
def test_prompts_of_every_length_pass_from_process_to_process(tmp_path: Path) -> None:
    """DeepSeek-V4 with the published rates and window: every remainder of them, twice. No two prompts begin alike, so
    that each is computed as a whole."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    model = tiny_models.make(tmp_path / "deepseek-v4", "deepseek-v4", compress_rates=rates, sliding_window=128)
    draw, oracle = random.Random(2), Oracle(model, block_size=128)
    together = [[draw.randrange(10, 250) for _ in range(length)] for length in range(1, 301)]
    for cluster in open_cluster(tmp_path, model, 1, 1, block_size="128"):
        modes = assert_answers(cluster, oracle, together)
        assert modes == {"split"}
        cluster.assert_baseline()


def running(cluster: Cluster, name: str) -> float:
    return cluster.processes[name].metric("twinpool_decode_running")
