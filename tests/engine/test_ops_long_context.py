"""Attention over contexts of several chunks, which threads share: right, and the same bits however it is shared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.latent_cache import LatentLayout
from engine.ops import cpu, reference
from tests.engine.paged import Paged, paged

LENGTHS = [1, 64, 700, 1023, 1024, 1025, 2049]  # a chunk is of 1,024 tokens
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _one_thread_afterwards() -> Iterator[None]:
    yield
    cpu.set_num_threads(1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def decode(case: Paged, which: list[int], threads: int) -> torch.Tensor:
    """One step of these sequences, in this order."""
    cpu.set_num_threads(threads)
    return cpu.decode_attention(
        torch.stack([case.q[s][-1] for s in which]),
        case.view,
        case.block_tables[torch.tensor(which)],
        [case.lengths[s] for s in which],
        case.scale,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_dtype", "heads"), [("int8", (9, 3)), ("bf16", (4, 1))])
def test_decode_is_the_reference_and_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(
    isa: str, dtype: torch.dtype, kv_dtype: str, heads: tuple[int, int]
) -> None:
    case = paged(LENGTHS, dtype=dtype, kv_dtype=kv_dtype, heads=heads, head_dim=64)
    everyone = list(range(len(LENGTHS)))
    together = decode(case, everyone, threads=1)
    last = torch.stack([q[-1].float() for q in case.q])
    want = reference.decode_attention(last, case.view, case.block_tables, LENGTHS, case.scale)
    assert (together.float() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    for threads in (2, 3, 4):
        assert same_bits(decode(case, everyone, threads), together)
        for s in everyone:
            assert same_bits(decode(case, [s], threads), together[s : s + 1])
    for s in (5, 6):
        assert same_bits(decode(case, [s], threads=1), together[s : s + 1])
        assert same_bits(decode(case, [s, 0, 0, 0, 0], threads=2)[:1], together[s : s + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_gives_the_bits_of_its_pieces_and_of_decode(isa: str, dtype: torch.dtype) -> None:
    length = 1100
    case = paged([length], dtype=dtype, heads=(4, 2), head_dim=32)
    q, table = case.q[0], case.block_tables
    whole = cpu.prefill_attention(q, case.view, table, [0, length], [length], case.scale)
    want = reference.prefill_attention(q.float(), case.view, table, [0, length], [length], case.scale)
    assert (whole.float() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    for threads, begin, end in [
        (3, 0, 1100),
        (1, 1000, 1030),
        (4, 1000, 1030),
        (4, 1090, 1100),
        (2, 900, 1050),
        (3, 1, 2),
    ]:
        cpu.set_num_threads(threads)
        piece = cpu.prefill_attention(q[begin:end], case.view, table, [0, end - begin], [end], case.scale)
        assert same_bits(piece, whole[begin:end])
    for position in (0, 700, 1022, 1023, 1024, 1099):
        step = cpu.decode_attention(q[position : position + 1], case.view, table, [position + 1], case.scale)
        assert same_bits(step, whole[position : position + 1])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_step_over_8192_tokens(threads: int) -> None:
    case = paged([8192], dtype=torch.bfloat16, heads=(9, 3), head_dim=64, block_size=64)
    got = decode(case, [0], threads)
    want = reference.decode_attention(case.q[0][-1:].float(), case.view, case.block_tables, [8192], case.scale)
    assert (got.float() - want).abs().max() <= 2**-7 * want.abs().max()
    assert same_bits(got, decode(case, [0], threads=1))


@pytest.mark.parametrize("where", [0, 1023, 1024, 2000, 2199])
def test_the_largest_score_may_lie_in_any_chunk(where: int) -> None:
    """One token outweighs all others by e ** 80: the result is its value."""
    case = paged([2200], dtype=torch.float32, kv_dtype="fp32", heads=(2, 1), head_dim=16)
    row, place = case.block_tables[0, where // 16].item(), where % 16
    q = case.q[0][-1:]
    q[:] = 1.0
    case.view.k[row, :, place] = 20.0  # 16 x 20 / 4 = 80
    for threads in (1, 3):
        got = decode(case, [0], threads).view(2, 16)
        torch.testing.assert_close(got, case.view.v[row, :, place].expand(2, 16))


def test_a_nan_reaches_who_sees_it_from_any_chunk() -> None:
    case = paged([2200], dtype=torch.float32, kv_dtype="fp32", heads=(2, 2), head_dim=16)
    case.view.v[case.block_tables[0, 1700 // 16].item(), 0, 1700 % 16, 3] = float("nan")
    for threads in (1, 3):
        got = decode(case, [0], threads).view(2, 16)
        assert got[0, 3].isnan()
        assert got[0, 4:].isfinite().all()
        assert got[1].isfinite().all()
        cpu.set_num_threads(threads)
        before = cpu.decode_attention(case.q[0][1700:1701], case.view, case.block_tables, [1700], case.scale)
        assert before.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
def test_latent_attention_is_shared_too(isa: str, dtype: torch.dtype, kv_dtype: str) -> None:
    lengths = [1025, 1024, 90]
    layout = LatentLayout(num_layers=1, rank=64, rope_dim=16, block_size=64, kv_dtype=kv_dtype)
    view = layout.view(0, [torch.zeros(30, layout.row_bytes, dtype=torch.uint8)])
    generator = torch.Generator().manual_seed(5)
    cached = torch.randn(30 * 64, 80, generator=generator).to(dtype)
    cpu.store_latents(cached[:, :64], cached[:, 64:], view, torch.arange(30 * 64))
    tables = torch.randperm(30, generator=generator)[: 3 * 18 // 2].int()
    tables = torch.stack([tables[:18], tables[5:23], tables[9:27]])
    q = torch.randn(4, 5, 80, generator=generator).to(dtype)  # two of the first sequence
    case = (tables, [0, 2, 3, 4], lengths, 80**-0.5)
    together = cpu.latent_attention(q, view, *case)
    want = reference.latent_attention(q.float(), view, *case)
    assert (together.float() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    for threads in (2, 4):
        cpu.set_num_threads(threads)
        assert same_bits(cpu.latent_attention(q, view, *case), together)
        alone = cpu.latent_attention(q[1:2], view, tables[:1], [0, 1], lengths[:1], 80**-0.5)
        assert same_bits(alone, together[1:2])
