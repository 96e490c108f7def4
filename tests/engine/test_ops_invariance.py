"""A row's result is the same bits whatever shares the call: what splitting, batching and chunking rest on."""

from __future__ import annotations

import random

import pytest
import torch

from engine.ops import cpu
from tests.engine.paged import Paged, paged

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("isa")  # on every instruction set


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(11)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    as_integers = {4: torch.int32, 2: torch.int16}[a.itemsize]
    assert torch.equal(a.contiguous().view(as_integers), b.contiguous().view(as_integers))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 200), (1537, 64), (2500, 70)])
def test_linear_rows_do_not_depend_on_the_batch_or_the_threads(dtype, in_features, out_features):
    x = torch.randn(300, in_features).to(dtype)
    packed = cpu.pack_linear(torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype))
    alone = torch.cat([cpu.linear(row[None], packed) for row in x])
    choose = random.Random(5)
    for num_rows in [*range(1, 20), 64, 239, 240, 241, 300]:
        cpu.set_num_threads(choose.randint(1, 4))
        rows = torch.tensor(choose.sample(range(300), num_rows))
        assert_same_bits(cpu.linear(x[rows], packed), alone[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_norms_rope_and_activation_do_not_depend_on_the_batch_or_the_threads(dtype):
    x, residual, weight = torch.randn(50, 96).to(dtype), torch.randn(50, 96).to(dtype), torch.randn(96).to(dtype)
    cos, sin = torch.randn(50, 16), torch.randn(50, 16)
    functions = [
        lambda r: cpu.rms_norm(x[r], weight, 1e-5),
        lambda r: torch.cat(cpu.add_rms_norm(x[r], residual[r], weight, 1e-5), dim=1),
        lambda r: cpu.rope(x[r].view(-1, 3, 32), x[r].view(-1, 3, 32), cos[r], sin[r])[0].flatten(1),
        lambda r: cpu.silu_mul(x[r]),
    ]
    choose = random.Random(6)
    for function in functions:
        alone = torch.cat([function(torch.tensor([i])) for i in range(50)])
        for num_rows in (2, 7, 8, 9, 33, 50):
            cpu.set_num_threads(choose.randint(1, 4))
            rows = torch.tensor(choose.sample(range(50), num_rows))
            assert_same_bits(function(rows), alone[rows])


def whole(case: Paged) -> list[torch.Tensor]:
    """Every sequence's attention as one prompt in one call, alone."""
    return [
        cpu.prefill_attention(q, case.view, case.block_tables[s : s + 1], [0, len(q)], [len(q)], case.scale)
        for s, q in enumerate(case.q)
    ]


CASES = [
    pytest.param({"kv_dtype": "int8", "block_size": 16, "heads": (9, 3), "head_dim": 64}, id="int8-smollm"),
    pytest.param({"kv_dtype": "int8", "block_size": 64, "heads": (4, 1), "head_dim": 128}, id="int8-128"),
    pytest.param({"kv_dtype": "bf16", "block_size": 32, "heads": (14, 2), "head_dim": 32}, id="bf16"),
    pytest.param({"kv_dtype": "fp32", "block_size": 16, "heads": (3, 3), "head_dim": 16}, id="fp32"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CASES)
def test_attention_does_not_depend_on_chunks_batch_mix_or_threads(dtype, shape):
    lengths = [1, 5, 64, 65, 150, 201]
    case = paged(lengths, dtype=dtype, **shape)
    alone = whole(case)
    choose = random.Random(8)
    for _ in range(12):
        cpu.set_num_threads(choose.randint(1, 4))
        # Any chunk of any sequences, in any order; a context ends with its chunk, as when a prompt comes in chunks.
        batch = choose.sample(range(len(lengths)), choose.randint(1, len(lengths)))
        chunks = []
        for s in batch:
            begin = choose.randrange(lengths[s])
            chunks.append((s, begin, choose.randint(begin + 1, lengths[s])))
        starts = [0]
        for _, begin, end in chunks:
            starts.append(starts[-1] + end - begin)
        got = cpu.prefill_attention(
            torch.cat([case.q[s][begin:end] for s, begin, end in chunks]),
            case.view,
            case.block_tables[torch.tensor(batch)],
            starts,
            [end for _, _, end in chunks],
            case.scale,
        )
        assert_same_bits(got, torch.cat([alone[s][begin:end] for s, begin, end in chunks]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CASES)
def test_decode_attention_equals_prefill_attention(dtype, shape):
    lengths = [130, 3, 64, 66]
    case = paged(lengths, dtype=dtype, **shape)
    alone = whole(case)
    for back in (1, 2, 3):  # the last, the last but one, ... token of every sequence at once
        got = cpu.decode_attention(
            torch.stack([q[-back] for q in case.q]),
            case.view,
            case.block_tables,
            [n - back + 1 for n in lengths],
            case.scale,
        )
        assert_same_bits(got, torch.stack([rows[-back] for rows in alone]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_depend_on_the_block_size(dtype):
    results = [whole(paged([130, 40], dtype=dtype, block_size=size)) for size in (1, 16, 24, 64, 128)]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_comes_later_changes_nothing_before_it(dtype):
    case = paged([90], dtype=dtype, kv_dtype="fp32", block_size=16)
    before = whole(case)[0]
    for position in range(70, 90):
        row = case.block_tables[0, position // 16].item()
        case.view.k[row, :, position % 16] = 1e4
        case.view.v[row, :, position % 16] = -3e30
    assert_same_bits(whole(case)[0][:70], before[:70])
