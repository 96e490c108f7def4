"""DeepSeek-V4 against transformers: logits, what is cached, and rows that are handed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import Batch
from engine.compressed_config import HEAVY, SPARSE, WINDOW
from engine.engine import Engine
from engine.ops import reference
from tests import tiny_models
from tests.engine.running import Running, greedy, logits_in_chunks, step
from tests.engine.test_models import TOLERANCE, load, oracle_logits, prompt

KINDS = ["deepseek-v4", "deepseek-v4-pro"]
ROPE_DIM = 8


@pytest.fixture(scope="module", params=KINDS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("v4") / "model", request.param)


def test_the_kinds_of_layers_are_those_that_either_spelling_names(tmp_path: Path) -> None:
    flash = load(tiny_models.make(tmp_path / "flash", "deepseek-v4")).config.compressed
    pro = load(tiny_models.make(tmp_path / "pro", "deepseek-v4-pro")).config.compressed
    assert flash is not None
    assert pro is not None
    assert flash.kinds == (WINDOW, WINDOW, SPARSE, HEAVY, SPARSE)
    assert pro.kinds == (HEAVY, HEAVY, SPARSE, HEAVY, SPARSE)


def test_the_reference_operators_give_transformers_logits(model_dir: Path) -> None:
    token_ids = prompt(40)
    engine = load(model_dir, backend="reference")
    expected = oracle_logits(model_dir, token_ids)
    for sizes in ([40], [5, 1, 16, 33]):
        assert (logits_in_chunks(engine, token_ids, sizes) - expected).abs().max() < TOLERANCE


def test_greedy_answers_of_a_batch_are_transformers(model_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompts = [prompt(length, seed=length) for length in (1, 15, 40)]
    for token_ids, answer in zip(prompts, greedy(load(model_dir), prompts, 12), strict=True):
        for _ in range(12):
            with torch.inference_mode():
                token_ids = [*token_ids, int(model(torch.tensor([token_ids])).logits[0, -1].argmax())]
        assert token_ids[-12:] == answer


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """The last ROPE_DIM elements from halves to pairs side by side, as transformers keeps them."""
    plain, turned = x[..., :-ROPE_DIM], x[..., -ROPE_DIM:]
    return torch.cat((plain, turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)), dim=-1)


def halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The same for keys or gates of one or two halves of `dim`."""
    return neighbours(x.unflatten(-1, (-1, dim))).flatten(-2)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 37, 48, 61])
def test_what_is_cached_is_what_transformers_caches(model_dir: Path, length: int) -> None:
    token_ids = prompt(length, seed=length)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([token_ids]), cache=cache)
    engine = load(model_dir)
    sequence = Running(engine, length)
    for begin in range(0, length, 11):
        step(engine, [sequence.item(token_ids[begin : begin + 11])])
    compressed = engine.config.compressed
    assert compressed is not None
    (row,) = sequence.states

    def check(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)

    layers = zip(model.model.layers, cache.layers, engine.cache.views, compressed.kinds, strict=True)
    for module, theirs, view, kind in layers:
        positions = torch.arange(max(0, length - compressed.window + 1), length)
        slots = row * compressed.window + positions % compressed.window
        check(neighbours(reference.gather_items(view.window, slots, torch.float32)), theirs.keys[0, 0])
        rate = compressed.rate(kind)
        parts = [("compressor", view.entries, view.unfinished, 32)] if rate else []
        parts += [("indexer", view.index, view.index_unfinished, 16)] if kind == SPARSE else []
        for name, items, unfinished, dim in parts:
            count = theirs.entry_count[name]
            assert count == length // rate
            blocks = torch.tensor(sequence.block_ids)
            entries = reference.gather_latents(items, blocks, torch.float32).flatten(0, 1)[:count]
            if count:
                check(neighbours(entries), theirs.compressed_kv[name].view(count, dim))
            left = unfinished.sums[row, : length % rate]
            check(halves(left[:, 0], dim), theirs.buffer_kv[name][0])
            check(halves(left[:, 1], dim), theirs.buffer_gate[name][0])
            if kind == SPARSE and count:
                compressor = module.self_attn.compressor
                compressor = compressor.indexer if name == "indexer" else compressor
                bias = compressor.position_bias.detach()[:, :dim]
                check(neighbours(unfinished.overlap[row, :, 0]), theirs.overlap_kv[name][0])
                check(neighbours(unfinished.overlap[row, :, 1]) + bias, theirs.overlap_gate[name][0])


@torch.inference_mode()
def poison(engine: Engine) -> None:
    """Nothing that nobody wrote may be read: it is no number."""
    for buffer in engine.cache.buffers:
        buffer.fill_(0xFF)


@torch.inference_mode()
def hand_over(source: Running, target: Running) -> None:
    """Copies what `source` has in its engine's cache to where `target` lies in another's."""
    caches = source.engine.cache, target.engine.cache
    for region, *buffers in zip(caches[0].regions, *(cache.buffers for cache in caches), strict=True):
        is_block = region.per == "block"
        ours, theirs = (each.block_ids if is_block else list(each.states) for each in (source, target))
        buffers[1][theirs] = buffers[0][ours]
    target.computed = source.computed


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_rows_that_are_handed_over_go_on_as_if_they_had_stayed(model_dir: Path, kv_dtype: str) -> None:
    prefill, decode = load(model_dir, kv_dtype=kv_dtype), load(model_dir, kv_dtype=kv_dtype)
    others = [Running(decode, 30) for _ in range(2)]  # so that rows have other numbers
    for engine in (prefill, decode):
        poison(engine)
    for length in (*range(1, 18), 31, 32, 33):  # every remainder of both rates
        token_ids = prompt(length + 2, seed=length)
        source, stayed, target = Running(prefill, 60), Running(prefill, 60), Running(decode, 60)
        step(prefill, [source.item(token_ids[:length])])
        step(prefill, [stayed.item(token_ids[:length])])
        hand_over(source, target)
        for token_id in token_ids[length:]:
            (expected,) = step(prefill, [stayed.item([token_id])])
            (got,) = step(decode, [target.item([token_id])])
            assert torch.equal(got, expected)
        for each in (source, stayed, target):
            each.end()
    for each in others:
        each.end()


def test_a_row_that_another_sequence_left_is_as_good_as_new(model_dir: Path) -> None:
    engine = load(model_dir)
    token_ids = prompt(40)
    expected = logits_in_chunks(engine, token_ids, [40])
    poison(engine)
    assert torch.equal(logits_in_chunks(engine, token_ids, [40]), expected)


def test_layers_are_announced_with_all_their_rows_stored(model_dir: Path) -> None:
    engine = load(model_dir)
    sequence = Running(engine, 20)
    seen: list[tuple[int, list[Any]]] = []

    def rows(layer: int) -> list[torch.Tensor]:
        return [
            engine.cache.buffers[number][row].clone()
            for per, row in (("block", sequence.block_ids[0]), ("sequence", sequence.states[0]))
            for number in engine.cache.numbers(layer, per)
        ]

    engine.forward(Batch.build([sequence.item(prompt(20))], 16), lambda layer: seen.append((layer, rows(layer))))
    assert [layer for layer, _ in seen] == list(range(5))
    for layer, found in seen:
        assert all(row.any() for row in found)
        assert all(torch.equal(a, b) for a, b in zip(found, rows(layer), strict=True))


def test_a_sequence_without_a_row_of_its_own_is_refused(model_dir: Path) -> None:
    engine: Engine = load(model_dir)
    item = Running(engine, 10).item([1, 2])
    with pytest.raises(ValueError, match="each needs a state"):
        engine.forward(Batch.build([type(item)(item.token_ids, item.start, item.block_ids)], 16))
