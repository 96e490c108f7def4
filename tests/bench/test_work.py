"""What a step needs, against transformers' models, what operators are really given, and figures worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from bench.operators import Operators
from bench.work import Counts, Work, work
from engine.batch import Batch, BatchItem
from engine.compressed_config import HEAVY, SPARSE, WINDOW
from engine.engine import Engine
from engine.ops import cpu, reference
from tests import tiny_models
from tests.engine.running import Running

KINDS = ["llama", "qwen2", "qwen3", "qwen3-moe", "mixtral", "deepseek-v3", "deepseek-v3-halves", "deepseek-v4"]


def load(path: Path, kind: str, **options: Any) -> Engine:
    options = {"backend": "reference", "dtype": "fp32", "kv_dtype": "fp32", "memory_bytes": 8 << 20} | options
    return Engine.load(tiny_models.make(path / kind, kind), **options)


def any_experts(engine: Engine) -> list[list[int]]:
    """As many as one token is sent to, of every layer with experts."""
    moe = engine.config.moe
    return [] if moe is None else [list(range(moe.experts_per_token))] * sum(moe.sparse_layers)


def parameters(path: Path) -> Iterable[tuple[str, torch.nn.Parameter, float]]:
    """Of transformers' model: what one token is multiplied with, and which share of it, which is less than 1 of
    experts."""
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.dim() > 1 and "embed_tokens" not in name and "position_bias" not in name:
            experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
            share = config.num_experts_per_tok / experts if value.dim() == 3 else 1.0
            yield name, value, share
        elif name.endswith("bias") and "score" not in name and value.dim() == 1:
            yield name, value, 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_multiplied_with_transformers_active_parameters(tmp_path: Path, kind: str) -> None:
    engine = load(tmp_path, kind)
    needed = work(engine, [BatchItem([1], 9, [0, 1], 0)], any_experts(engine))
    expected = sum(value.numel() * share for _, value, share in parameters(tmp_path / kind))
    got = needed["linear"].operations + (needed["moe"].operations if "moe" in needed else 0)
    assert got == 2 * round(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_reads_transformers_active_parameters(tmp_path: Path, kind: str) -> None:
    """In fp32: no format adds a scale, and biases are read too. What is chosen for is not a matrix's bias."""
    engine = load(tmp_path, kind)
    needed = work(engine, [BatchItem([1], 9, [0, 1], 0)], any_experts(engine))
    expected = sum(value.numel() * (share or 1) for _, value, share in parameters(tmp_path / kind))
    got = needed["linear"].num_bytes + (needed["moe"].num_bytes if "moe" in needed else 0)
    assert got == 4 * round(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_multiplied_with_what_is_described_as_active(tmp_path: Path, kind: str) -> None:
    """engine.describe's figures are those that publishers give, see tests/engine/test_describe.py."""
    engine = load(tmp_path, kind)
    config = engine.config
    needed = work(engine, [BatchItem([1], 9, [0, 1], 0)], any_experts(engine))
    got = needed["linear"].operations + (needed["moe"].operations if "moe" in needed else 0)
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    merge = 0 if config.compressed is None else config.compressed.streams**2 * config.hidden_size
    assert got == 2 * (config.num_active_parameters - table + merge)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_decode_steps_operations_are_those_that_torch_counts_in_transformers(tmp_path: Path, kind: str) -> None:
    engine = load(tmp_path, kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / kind, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=model.config)
        model(torch.arange(3, 60).unsqueeze(0), cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(torch.tensor([[7]]), cache=cache)
    needed = work(engine, [BatchItem([7], 57, [0], None)], [])
    got = needed["linear"].operations + needed["attention"].operations
    assert got == pytest.approx(counter.get_total_flops(), rel=1e-3)  # which has the angles of rope as well


def test_rows_of_logits_are_fewer_than_tokens(tmp_path: Path) -> None:
    engine = load(tmp_path, "llama")
    head = engine.config.vocab_size * engine.config.hidden_size
    one = work(engine, [BatchItem([1], 0, [0])], [])["linear"]
    prompts = work(engine, [BatchItem(range(10), 0, [0]), BatchItem(range(7), 5, [1])], [])["linear"]
    assert prompts.operations == 17 * (one.operations - 2 * head) + 2 * 2 * head
    assert prompts.num_bytes == one.num_bytes


def test_counts_are_those_of_a_triangle() -> None:
    counts = Counts.of([BatchItem(range(3), 0, [0]), BatchItem(range(2), 5, [1]), BatchItem([1], 9, [2])])
    assert counts == Counts(tokens=6, contexts=3 + 7 + 10, pairs=(1 + 2 + 3) + (6 + 7) + 10)


def test_experts_are_read_once_each_and_computed_for_every_token(tmp_path: Path) -> None:
    """Experts 3 x 64 x 48, routers 16 x 64 in fp32, two layers of three; of DeepSeek-V3 a shared expert as well."""
    items = [BatchItem([1], 9, [0]), BatchItem([2], 3, [1])]
    for kind, shared in (("qwen3-moe", 0), ("deepseek-v3", 1)):
        engine = load(tmp_path, kind, dtype="bf16")
        got = work(engine, items, [[0, 2, 3, 5, 7], [1, 2, 3, 4]])["moe"]
        assert got.num_bytes == 2 * 9216 * (5 + 4 + 2 * shared) + 2 * 4 * 1024
        assert got.operations == 2 * 2 * 2 * (9216 * (4 + shared) + 1024)


def test_attention_over_keys_and_values_by_hand(tmp_path: Path) -> None:
    """llama: three layers, 4 heads and 2 of keys and values, 16 elements; int8 with a scale of 2 bytes each."""
    engine = load(tmp_path, "llama", kv_dtype="int8", dtype="bf16")
    needed = work(engine, [BatchItem([1], 99, [0, 1]), BatchItem([2], 9, [2])], [])
    token_bytes = 3 * 2 * 2 * (16 + 2)
    assert needed["attention"] == Work(110 * token_bytes, 3 * 4 * 2 * (16 + 16) * 110)
    assert needed["kv_access"] == Work(2 * token_bytes, 0)
    assert needed["sampling"] == Work(2 * 384 * 2, 2 * 384)
    assert set(needed) == {"linear", "attention", "kv_access", "sampling"}


def test_attention_over_latents_by_hand(tmp_path: Path) -> None:
    """Three layers, 4 heads; latents of 32 and rotated keys of 8; 16 elements a head without rope, values of 20."""
    items = [BatchItem(range(10), 5, [0])]  # sees 6 + ... + 15 = 105
    chosen = [[0], [0]]
    absorbed = work(load(tmp_path, "deepseek-v3", kv_dtype="int8", dtype="bf16"), items, chosen)
    token_bytes = 3 * (32 + 2 * 8 + 2)
    assert absorbed["attention"] == Work(15 * token_bytes, 3 * 4 * 2 * (32 + 8 + 32) * 105)
    assert absorbed["kv_access"] == Work(10 * token_bytes, 0)
    plain = work(load(tmp_path, "deepseek-v3", kv_dtype="int8", dtype="bf16", latent_form="plain"), items, chosen)
    assert plain["attention"] == Work(15 * 3 * 4 * (24 + 20) * 2, 3 * 4 * 2 * (24 + 20) * 105)
    assert plain["kv_access"] == Work((10 + 15) * token_bytes, 0)
    up = 3 * 4 * (16 + 20) * 32  # of keys and values, over all that is cached and not the new tokens alone
    assert plain["linear"].operations - absorbed["linear"].operations == 2 * up * (15 - 10)


class Given:
    """What the operators of attention over windows and entries are given, layer by layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pairs = self.scored = self.stored = self.gathered = 0
        self.entries_read: list[int] = []
        for name in ("sparse_attn_sharedkv", "lightning_indexer", "store_latents", "gather_items"):
            self._wrap(monkeypatch, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        function = getattr(cpu, name)

        def noted(*args: Any) -> Any:
            getattr(self, name)(*args)
            return function(*args)

        monkeypatch.setattr(cpu, name, noted)

    def sparse_attn_sharedkv(self, q: Any, local: Any, spans: Any, view: Any, slots: Any, *_: Any) -> None:
        self.pairs += int((spans[:, 1] - spans[:, 0]).sum()) + int((slots >= 0).sum())
        self.entries_read.append(len(set(slots[slots >= 0].tolist())))

    def lightning_indexer(self, q: Any, w: Any, view: Any, tables: Any, start: Any, visible: Any, k: int) -> None:
        self.scored += sum(each for each in visible if each > k)

    def store_latents(self, latents: Any, rope: Any, view: Any, slots: Any) -> None:
        self.stored += len(slots) * _item_bytes(view)

    def gather_items(self, view: Any, slots: Any, *_: Any) -> None:
        self.gathered += len(slots) * _item_bytes(view)


def _item_bytes(view: Any) -> int:
    scale = 0 if view.scale is None else view.scale.itemsize
    return view.latents.shape[-1] * view.latents.itemsize + view.rope.shape[-1] * view.rope.itemsize + scale


@pytest.mark.parametrize("kind", ["deepseek-v4", "deepseek-v4-pro"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp32"])
def test_attention_over_entries_counts_what_its_operators_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kv_dtype: str
) -> None:
    """A prompt in two chunks, and a step of one token each for it and a second sequence."""
    engine = load(tmp_path, kind, backend="cpu", kv_dtype=kv_dtype)
    config, compressed = engine.config, engine.config.compressed
    assert compressed is not None
    first, second = Running(engine, 100), Running(engine, 100)
    for items in (
        [first.item(range(3, 26))],
        [first.item(range(30, 67)), second.item(range(9))],
        [first.item([5]), second.item([6])],
    ):
        given = Given(monkeypatch)
        engine.forward(Batch.build(items, engine.cache.layout.block_size))
        monkeypatch.undo()
        needed = work(engine, items, any_experts(engine))
        products = 4 * config.num_heads * compressed.head_dim * given.pairs
        scores = given.scored * compressed.index_heads * 2 * (compressed.index_dim + 1)
        assert needed["attention"].operations == products + scores
        assert needed["kv_access"].num_bytes - sums(engine, items) == given.stored + given.gathered


def sums(engine: Engine, items: list[BatchItem]) -> int:
    """Bytes of keys and gates in fp32: token by token, those that are kept and those that are taken up again."""
    compressed = engine.config.compressed
    assert compressed is not None
    found = 0
    for kind in compressed.kinds:
        if kind == WINDOW:
            continue
        rate = compressed.rate(kind)
        dims = (compressed.head_dim, compressed.index_dim) if kind == SPARSE else (compressed.head_dim,)
        width = sum(dims) * (2 if kind == SPARSE else 1)
        for item in items:
            start, end = item.start, item.start + len(item.token_ids)
            last = max((p for p in range(start, end) if (p + 1) % rate == 0), default=None)
            kept = [p for p in range(start, end) if last is None or p > last]
            taken = [] if last is None else [p for p in range(start) if p // rate == start // rate]
            found += (len(kept) + len(taken)) * 2 * width * 4
            if kind == SPARSE and last is not None:
                found += (2 if start // rate else 1) * rate * 2 * sum(dims) * 4
    return found


def test_a_step_of_deepseek_v4_by_hand(tmp_path: Path) -> None:
    """The 50th token, int8. Layers: two over windows of 8, two sparse (an entry for 4, of which 4 of 12 are chosen by
    32 heads of 16), one heavy (an entry for 16). 4 heads of 32, of which rope turns 8; activations in bf16."""
    engine = load(tmp_path, "deepseek-v4", kv_dtype="int8", dtype="bf16")
    assert engine.config.compressed is not None
    assert engine.config.compressed.kinds == (WINDOW, WINDOW, SPARSE, HEAVY, SPARSE)
    needed = work(engine, [BatchItem([1], 49, [0], 0)], any_experts(engine))
    entry, index = 24 + 2 * 8 + 2, 16 + 2
    windows = 5 * 8 * 32 * 2  # seven of the cache and its own, as activations
    assert needed["attention"].num_bytes == windows + 2 * (4 * entry + 12 * index) + 3 * entry
    assert needed["attention"].operations == 4 * 4 * 32 * (5 * 8 + 2 * 4 + 3) + 2 * 12 * 32 * 2 * (16 + 1)
    kept = 2 * (2 * 2 * (32 + 16) * 4) + 2 * 32 * 4  # keys and gates: two halves of two layers, one of the heavy layer
    assert needed["kv_access"] == Work(5 * (7 + 1) * entry + kept, 0)


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v4"])
def test_chosen_experts_are_those_that_any_token_is_sent_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, backend: Any
) -> None:
    engine = load(tmp_path, kind, backend=backend.NAME, dtype="bf16")
    model: Any = engine._model
    monkeypatch.setattr(model, "decoder", lambda views: None)
    sent: list[list[int]] = []
    experts = backend.moe_experts

    def noted(x: Any, packed: Any, weights: Any, chosen: Any) -> Any:
        if len(packed.down) > 1:  # what every token passes through beside has one
            sent.append(sorted(set(chosen.flatten().tolist())))
        return experts(x, packed, weights, chosen)

    monkeypatch.setattr(backend, "moe_experts", noted)
    operators = Operators(backend, lambda kind, name: nullcontext())
    operators.record(True)
    try:
        engine.forward(Batch.build([Running(engine, 64).item([3, 7, 11])], engine.cache.layout.block_size))
        assert operators.chosen_experts == sent != []
    finally:
        operators.record(False)
    assert backend.moe_experts is noted
