"""moe_experts and grouped_linear: against transformers and torch; what they read, what a row depends on."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.ops import cpu, cpu_moe, native, reference
from engine.quantization import WEIGHT_FORMATS
from tests.engine.isas import ISAS

HIDDEN, INNER, EXPERTS, CHOSEN = 96, 40, 12, 3


@pytest.fixture(params=["reference", *ISAS])
def ops(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    if request.param != "reference":
        native.select_isa(request.param)
    yield reference if request.param == "reference" else cpu
    native.select_isa(ISAS[-1])


def routed(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return reference.moe_gating_top_k(logits, CHOSEN)


def matrices(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) * INNER**-0.5
    return gate_up.to(dtype), down.to(dtype)


def packed(
    ops: ModuleType, gate_up: torch.Tensor, down: torch.Tensor, weights: str = WEIGHT_FORMATS[0], **kinds: Any
) -> Any:
    pack = [[ops.pack_linear(each, None, weights) for each in kind] for kind in (gate_up, down)]
    return ops.pack_experts(*pack, **kinds)


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(5)) * 2).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("limit", [None, 0.8])
def test_experts_give_what_transformers_gives(ops: ModuleType, limit: float | None) -> None:
    gate_up, down = matrices()
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    if limit is None:
        oracle = Qwen3MoeExperts(transformers.Qwen3MoeConfig(num_experts=EXPERTS, **sizes))
    else:
        config = transformers.DeepseekV4Config(n_routed_experts=EXPERTS, swiglu_limit=limit, **sizes)
        oracle = DeepseekV4Experts(config)
    oracle.gate_up_proj.data, oracle.down_proj.data = gate_up, down
    experts = packed(ops, gate_up, down, **({} if limit is None else {"limit": limit}))
    for rows in (1, 2, 7, 300):
        x, (weights, chosen) = inputs(rows), routed(rows)
        got = ops.moe_experts(x, experts, weights, chosen)
        torch.testing.assert_close(got, oracle(x, chosen.long(), weights), rtol=1e-5, atol=1e-5)
    assert ops.moe_experts(x[:0], experts, weights[:0], chosen[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_gives_the_reference_in_every_format(isa: str, dtype: torch.dtype, weights: str) -> None:
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1))).Q.to(dtype)
    got, want = (
        ops.moe_experts(
            inputs(40, dtype),
            packed(ops, *matrices(dtype), weights, gated_rotation=ops.pack_linear(rotation, None)),
            *routed(40),
        )
        for ops in (cpu, reference)
    )
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.04}[dtype] if weights != "w8a8" else 0.06
    assert (got.float() - want.float()).abs().max() < bound


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others_or_on_threads(isa: str, dtype: torch.dtype, weights: str) -> None:
    experts = packed(cpu, *matrices(dtype), weights)
    x, (w, chosen) = inputs(300, dtype), routed(300)
    alone = torch.cat([cpu.moe_experts(x[i : i + 1], experts, w[i : i + 1], chosen[i : i + 1]) for i in range(300)])
    choose = random.Random(3)
    for rows in (2, 5, 13, 300):
        cpu.set_num_threads(choose.randint(1, 3))
        some = torch.tensor(choose.sample(range(300), rows))
        assert torch.equal(cpu.moe_experts(x[some], experts, w[some], chosen[some]), alone[some])


def test_matrices_of_experts_that_nobody_chose_are_not_touched(isa: str) -> None:
    """Their addresses lead nowhere: touching them would end the process."""
    x, w = inputs(2), torch.full((2, 2), 0.5)
    chosen = torch.tensor([[1, 4], [4, 7]], dtype=torch.int32)
    experts = packed(cpu, *matrices())
    want = cpu.moe_experts(x, experts, w, chosen)
    for e in set(range(EXPERTS)) - {1, 4, 7}:
        for kind in (experts.args.gate_up, experts.args.down):
            kind[e].panels = None
    assert torch.equal(cpu.moe_experts(x, experts, w, chosen), want)
    assert isinstance(experts.args, ctypes.Structure)


def test_a_token_reads_little_more_than_its_experts_parameters() -> None:
    gate_up, down = torch.zeros(16, 2 * 768, 512).bfloat16(), torch.zeros(16, 512, 768).bfloat16()
    experts = packed(cpu, gate_up, down)
    parameters = 3 * 768 * 512 * 2
    assert 8 * parameters <= experts.nbytes(range(8)) <= 1.1 * 8 * parameters
    assert experts.nbytes([3, 3]) * 16 == experts.nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_linear_multiplies_each_group_with_its_own(ops: ModuleType, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    whole = torch.randn(9, 5, 24, generator=generator).to(dtype)
    weight = torch.randn(5, 70, 16, generator=generator).to(dtype)
    groups = ops.pack_groups([ops.pack_linear(each, None) for each in weight])
    for x in (whole[..., 4:20], whole[..., :16].contiguous()):
        got = ops.grouped_linear(x, groups)
        want = torch.einsum("tgi,goi->tgo", x.float(), weight.float())
        assert got.shape == (9, 5, 70)
        assert (got.float() - want).abs().max() < (1e-4 if dtype is torch.float32 else 0.1)
        alone = torch.cat([ops.grouped_linear(row[None], groups) for row in x])
        assert ops is reference or torch.equal(got, alone)


def test_experts_that_do_not_fit_together_are_refused() -> None:
    gate_up, down = matrices()
    pack = [[cpu.pack_linear(each, None) for each in kind] for kind in (gate_up, down)]
    with pytest.raises(ValueError, match="expert 1 is"):
        cpu.pack_experts(pack[0], [pack[1][0], cpu.pack_linear(down[1][:8], None), *pack[1][2:]])
    with pytest.raises(ValueError, match="11 gate_up matrices, 12 down"):
        cpu.pack_experts(pack[0][1:], pack[1])
    with pytest.raises(ValueError, match="multiples of 4"):
        cpu.pack_experts([cpu.pack_linear(torch.zeros(4, 6), None)], [cpu.pack_linear(torch.zeros(6, 2), None)])
    experts = cpu.pack_experts(*pack)
    with pytest.raises(ValueError, match="x must be"):
        cpu.moe_experts(inputs(2).bfloat16(), experts, *routed(2))
    with pytest.raises(ValueError, match="chosen must be"):
        cpu.moe_experts(inputs(2), experts, routed(2)[0], routed(2)[1].long())
    with pytest.raises(ValueError, match="one shape"):
        cpu_moe.pack_groups([pack[0][0], pack[1][0]])
