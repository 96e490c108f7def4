"""DeepSeek-V4 with the sizes of Flash, two layers of each kind and 8 experts, through both pools on two cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_deepseek_v4, tiny_models
from tests.flow import cluster as deployments
from tests.flow.cluster import Cluster

MOST_BYTES = 12_000_000_000
FLASH: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 6,
    "compress_ratios": [0, 0, 4, 128, 4, 128],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 8,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1 << 20,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}


def cheap_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor is cut out of one block of random numbers, each a little further on."""
    block = torch.randn(1 << 26, generator=torch.Generator().manual_seed(seed))
    place = 0

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal place
        size = torch.Size(shape).numel()
        place = (place + 1_000_003) % (len(block) - size)
        return block[place : place + size].view(shape)

    return tiny_deepseek_v4.random_weights(config, seed, draw)


class Memory(threading.Thread):
    """Watches what all processes hold together: also what they have mapped of files, a page that several share once."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster, self.ended = cluster, threading.Event()
        self.most, self.samples = 0, 0
        self.then: dict[str, dict[str, int]] = {}  # what each process held when all held most

    def run(self) -> None:
        while not self.ended.wait(0.05):
            held = {name: _held(process.popen.pid) for name, process in list(self.cluster.processes.items())}
            total = sum(each.get("Pss", 0) for each in held.values())
            if total > self.most:
                self.most, self.then = total, held
            self.samples += 1


def _held(pid: int) -> dict[str, int]:
    """Bytes as "Pss", a page that n processes have mapped as the n-th part, and kinds of it; none of a dead process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    split = [line.split() for line in lines if line.startswith("Pss")]
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, _ in split}


@contextmanager
def watched(cluster: Cluster) -> Iterator[Memory]:
    memory = Memory(cluster)
    memory.start()
    try:
        yield memory
    finally:
        memory.ended.set()
        memory.join()
        cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_flash_sizes_run_through_the_pools_within_12_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments, "START_TIMEOUT_S", 400.0)
    began = time.monotonic()
    model = tiny_models.make(tmp_path / "model", "deepseek-v4", shards=6, weights=cheap_weights, **FLASH)
    cluster = Cluster(tmp_path, model)
    options = {"dtype": "bf16", "memory": "256MiB", "block_size": "0", "threads": "2"}
    with watched(cluster) as memory:
        written = time.monotonic()
        cluster.router(probe_timeout="120")
        for pool, more in (("prefill", {}), ("decode", {"swap": "16MiB"})):  # one after the other: each reads 4 GB
            cluster.worker(pool, pool, **options, **more)
            cluster.wait_ready(pool)
        cluster.wait_workers(2)
        ready = time.monotonic()
        with cluster.client() as client:
            prompt = torch.randint(3, 300, (300,), generator=torch.Generator().manual_seed(1)).tolist()
            answer = client.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True, deadline_s=300).token_ids
            answered = time.monotonic()
            # The same text, handed over five tokens later, with another remainder of both rates.
            later = client.generate(
                prompt + answer[:5], max_tokens=7, temperature=0, ignore_eos=True, deadline_s=300
            ).token_ids
        cluster.assert_baseline()
    assert len(answer) == 12
    assert len(set(answer)) > 3
    assert later == answer[5:]
    print(
        f"written in {written - began:.0f} s, ready in {ready - written:.0f} s, 300 + 12 tokens in "
        f"{answered - ready:.1f} s, {memory.most / 1e9:.1f} GB at most in {memory.samples} samples"
    )
    for name, held in memory.then.items():
        print(name, {kind: f"{size / 1e9:.2f} GB" for kind, size in held.items()})
    assert memory.samples > 100
    assert memory.most < MOST_BYTES
