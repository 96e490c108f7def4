"""AMX: the kernels in tiles, on a model of the tiles in software, since few machines have them.

The right values come from Intel's description of the instructions (Software Developer's Manual, volume 2, TDPBF16PS and
TDPBUSD), written down here once more, in float64. That the real kernels hold the real instructions is read in the
built library. The other tests of kernels (test_ops_*.py) run over the emulated ones too.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from engine.ops import cpu, native, reference
from engine.quantization import W8A8, W8A16
from tests.engine.paged import paged

BEST = native.isa()
emulated = pytest.mark.skipif(
    not native.select_isa(native.EMULATED), reason="the emulated kernels need AVX-512 with BF16, as those with tiles do"
)
native.select_isa(BEST)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    native.select_isa(native.EMULATED)
    torch.manual_seed(3)
    yield
    native.select_isa(BEST)
    cpu.set_num_threads(1)


def spread(rows: int, columns: int) -> torch.Tensor:
    """Numbers of very different sizes, so that the order of a sum shows; float64 holds sums of two products exactly."""
    return (torch.randn(rows, columns) * 8.0 ** torch.randint(-2, 3, (rows, columns))).bfloat16()


def flushed(x: torch.Tensor) -> torch.Tensor:
    """Rounded to fp32, subnormal numbers to zero."""
    x = x.float()
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x).double()


def as_documented(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, K] times weight [out, K] in bf16, added up as TDPBF16PS does, 32 of k at a time -> fp32 [rows, out]."""
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    a, b = flushed(x), flushed(weight)
    for begin in range(0, x.shape[1], 32):
        halves = []
        for parity in range(2):
            part = torch.zeros_like(total)
            for k in range(begin + parity, min(begin + 32, x.shape[1]), 2):
                part = flushed(part + a[:, k : k + 1] * b[:, k])  # fused: rounded once
            halves.append(part)
        total = flushed(total + flushed(halves[0] + halves[1]))
    return total.float()


@emulated
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(1, 32, 64), (1, 1, 1), (16, 576, 70), (17, 70, 65), (31, 33, 130), (32, 64, 64), (33, 100, 3), (65, 2081, 20)],
)
def test_sums_of_bf16_are_the_documented_ones_bit_for_bit(rows: int, in_features: int, out_features: int) -> None:
    x, weight = spread(rows, in_features), spread(out_features, in_features)
    got = cpu.linear(x, cpu.pack_linear(weight, None))
    assert torch.equal(got, as_documented(x, weight).bfloat16())


@emulated
def test_even_and_odd_products_are_summed_apart() -> None:
    """1e8 + 1 - 1e8 + 1 is 1 from left to right in fp32, but 2 in a tile."""
    weight = torch.tensor([[2.0**27, 1.0, -(2.0**27), 1.0]]).bfloat16()
    got = cpu.linear(torch.ones(1, 4).bfloat16(), cpu.pack_linear(weight, None))
    assert got.item() == 2.0


@emulated
def test_subnormal_numbers_are_zero_coming_and_going() -> None:
    x = torch.tensor([[1.0, 1.0], [2.0**-100, 0.0]]).bfloat16()
    weight = torch.tensor([[1e-39, 1e-39], [2.0**-30, 0.0]]).bfloat16()
    assert weight[0, 0] > 0
    assert cpu.linear(x, cpu.pack_linear(weight, None)).tolist() == [[0.0, 2.0**-30], [0.0, 0.0]]


@emulated
@pytest.mark.parametrize("weights", ["bf16", W8A16, W8A8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_their_own_row_and_no_other(weights: str, bad: float) -> None:
    x, packed = torch.randn(40, 80).bfloat16(), cpu.pack_linear(torch.randn(70, 80).bfloat16(), None, weights)
    clean = cpu.linear(x, packed)
    x[35, 17] = bad
    got = cpu.linear(x, packed)
    assert not got[35].isfinite().any()
    others = torch.arange(40) != 35
    assert torch.equal(got[others], clean[others])


@emulated
@pytest.mark.parametrize("weights", ["bf16", W8A16, W8A8])
@pytest.mark.parametrize("in_features", [576, 97])
def test_batches_of_1_to_65_give_the_bits_of_each_row_alone(weights: str, in_features: int) -> None:
    x, weight = torch.randn(65, in_features).bfloat16(), torch.randn(130, in_features).bfloat16()
    packed = cpu.pack_linear(weight, torch.randn(130).bfloat16(), weights)
    alone = torch.cat([cpu.linear(row[None], packed) for row in x])
    for rows in range(1, 66):
        cpu.set_num_threads(1 + rows % 3)
        assert torch.equal(cpu.linear(x[:rows], packed), alone[:rows])


@emulated
def test_int8_sums_are_those_without_tiles() -> None:
    """Exact integers: rows enough for tiles give what the vectors of another instruction set give."""
    x, weight = torch.randn(250, 1537).bfloat16(), torch.randn(100, 1537).bfloat16()
    x[3] = 1e30
    x[4], x[5, ::2] = 0, -x[5].abs().max()
    packed = cpu.pack_linear(weight, None, W8A8)
    got = cpu.linear(x, packed)
    native.select_isa("generic")
    assert torch.equal(got, cpu.linear(x, packed))


@emulated
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((2, 2), 80), ((20, 1), 128), ((34, 1), 6)])
def test_flash_attention_in_tiles_is_the_reference(kv_dtype: str, heads: tuple[int, int], head_dim: int) -> None:
    lengths = [1, 31, 65, 200]
    case = paged(lengths, dtype=torch.bfloat16, kv_dtype=kv_dtype, heads=heads, head_dim=head_dim)
    q, starts = case.all_queries()
    cpu.set_num_threads(3)
    got = cpu.prefill_attention(q, case.view, case.block_tables, starts, lengths, case.scale)
    want = reference.prefill_attention(q.float(), case.view, case.block_tables, starts, lengths, case.scale)
    assert (got.float() - want).abs().max() <= 2**-7 * want.abs().max()
    last = torch.stack([rows[-1] for rows in case.q])
    decoded = cpu.decode_attention(last, case.view, case.block_tables, lengths, case.scale)
    assert torch.equal(decoded, got[torch.tensor(starts[1:]) - 1])


# ---- the real instructions ----


@functools.cache
def instructions() -> set[str]:
    """Every instruction of the built library that has to do with tiles, in AT&T's order (the result comes last)."""
    if platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("needs objdump, and a library for x86-64")
    library = next(Path(native.__file__).parent.glob("_native*.so"))
    listing = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.findall(r"\t((?:tdp\w+|ldtilecfg|tile\w+)\b[^\n#<]*)", listing)
    if not found and _gcc_version() < 11:
        pytest.skip("built by a gcc that does not know the instructions of tiles (11 does)")
    return {re.sub(r"\s+", " ", each).strip() for each in found}


def _gcc_version() -> int:
    said = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True, timeout=60).stdout
    return int(said.split(".")[0])


def test_the_library_holds_the_instructions_of_tiles() -> None:
    names = {each.split()[0] for each in instructions()}
    assert names == {
        *("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"),
        *("tdpbf16ps", "tdpbusd"),
    }


@pytest.mark.parametrize("name", ["tdpbf16ps", "tdpbusd"])
def test_every_sum_has_its_rows_and_columns(name: str) -> None:
    """Up to 16 rows: four sums of one tile of x; more: two by two."""
    operands = {each.split()[1] for each in instructions() if each.startswith(name)}
    upper = {("5", "4", "0"), ("6", "4", "1"), ("7", "4", "2"), ("5", "4", "3")}
    both = {("6", "4", "0"), ("7", "4", "1"), ("6", "5", "2"), ("7", "5", "3")}
    assert operands == {",".join(f"%tmm{tile}" for tile in each) for each in upper | both}


def test_a_refusal_of_tiles_is_said_and_their_absence_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for reason in (b"", b"the kernel refused permission for tiles"):
            native.say_why_no_amx(cast(ctypes.CDLL, SimpleNamespace(twinpool_why_no_amx=lambda reason=reason: reason)))
    (record,) = caplog.records
    assert "AMX is not used" in record.message
    assert "the kernel refused permission for tiles" in record.message
