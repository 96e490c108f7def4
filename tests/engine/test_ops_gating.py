"""moe_gating_top_k: both backends against the routers of transformers, and the native kernel against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from engine.ops import cpu, native, reference

ISAS = [name for name in native.ISAS if native.select_isa(name)]
DEEPSEEK_V3 = {"k": 8, "k_group": 4, "group_count": 8, "norm_type": "sigmoid", "routed_scaling_factor": 2.5}
MODES: dict[str, dict[str, Any]] = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v4": {"k": 6, "norm_type": "sqrtsoftplus", "routed_scaling_factor": 1.5},
    "qwen3-moe": {"k": 8, "eps": 0.0},
    "softmax-as-is": {"k": 2, "renorm": False},
    "one": {"k": 1, "norm_type": "sigmoid"},
    "many": {"k": 70, "norm_type": "sigmoid"},
}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.select_isa(request.param)
    yield request.param
    native.select_isa(ISAS[-1])


@pytest.fixture(params=["reference", *ISAS])
def ops(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    if request.param != "reference":
        native.select_isa(request.param)
    yield reference if request.param == "reference" else cpu
    native.select_isa(ISAS[-1])


def same_routing(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], experts: int) -> None:
    """The same experts with the same weights, in whatever order."""
    dense = [torch.zeros(len(w), experts).scatter_(1, e.long(), w.float()) for w, e in (got, want)]
    chosen = [torch.zeros(len(w), experts).scatter_(1, e.long(), 1.0) for w, e in (got, want)]
    assert torch.equal(*chosen)
    torch.testing.assert_close(*dense, rtol=2e-6, atol=1e-12)


def filled(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """With random weights, and a bias large enough to change the choice."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name == "tid2eid":
            tensor.data = torch.stack(
                [torch.randperm(module.num_experts, generator=generator)[: tensor.shape[1]] for _ in tensor]
            )
        else:
            tensor.data = torch.randn(tensor.shape, generator=generator) * (0.05 if "bias" in name else 0.3)
    return module.eval()


def hidden_states(width: int, rows: int = 200) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7))


@torch.inference_mode()
def test_deepseek_v3_routes_as_transformers(ops: ModuleType) -> None:
    config = transformers.DeepseekV3Config(hidden_size=32)
    router, x = filled(DeepseekV3TopkRouter(config)), hidden_states(32)
    logits, weights, experts = router(x)
    got = ops.moe_gating_top_k(logits, bias=router.e_score_correction_bias, **DEEPSEEK_V3)
    same_routing(got, (weights, experts), 256)
    without_bias = ops.moe_gating_top_k(logits, **DEEPSEEK_V3)
    assert not torch.equal(without_bias[1].sort().values, got[1].sort().values)  # the test would see a lost bias


@torch.inference_mode()
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_qwen3_moe_routes_as_transformers(ops: ModuleType, norm_topk_prob: bool) -> None:
    config = transformers.Qwen3MoeConfig(hidden_size=32, norm_topk_prob=norm_topk_prob)
    logits, weights, experts = filled(Qwen3MoeTopKRouter(config))(hidden_states(32))
    got = ops.moe_gating_top_k(logits, 8, renorm=norm_topk_prob, eps=0.0)
    same_routing(got, (weights, experts), 128)


@torch.inference_mode()
def test_mixtral_routes_as_transformers(ops: ModuleType) -> None:
    config = transformers.MixtralConfig(hidden_size=32)
    logits, weights, experts = filled(MixtralTopKRouter(config))(hidden_states(32))
    same_routing(ops.moe_gating_top_k(logits, 2, eps=0.0), (weights, experts), 8)


@torch.inference_mode()
def test_deepseek_v4_routes_as_transformers_by_score_and_by_token(ops: ModuleType) -> None:
    config = transformers.DeepseekV4Config(hidden_size=32, vocab_size=50)
    router, x = filled(DeepseekV4TopKRouter(config)), hidden_states(32)
    logits, weights, experts = router(x)
    got = ops.moe_gating_top_k(logits, bias=router.e_score_correction_bias, **MODES["deepseek-v4"])
    same_routing(got, (weights, experts), 256)

    router, token_ids = filled(DeepseekV4HashRouter(config)), torch.arange(200) % 50
    logits, weights, experts = router(x, token_ids)
    got = ops.moe_gating_top_k(logits, input_ids=token_ids, tid2eid=router.tid2eid.int(), **MODES["deepseek-v4"])
    same_routing(got, (weights, experts), 256)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_experts", [256, 384, 120, 72])
def test_native_gives_the_reference_also_for_wide_logits(isa: str, mode: str, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    for spread in (0.1, 3.0, 40.0):
        logits = torch.randn(64, num_experts, generator=generator) * spread
        bias = torch.randn(num_experts, generator=generator) * 0.1
        bias = None if MODES[mode].get("norm_type", "softmax") == "softmax" else bias
        got = cpu.moe_gating_top_k(logits, bias=bias, **MODES[mode])
        want = reference.moe_gating_top_k(logits, bias=bias, **MODES[mode])
        # Experts whose scores are an ulp apart may change places, or are both zero in one of them.
        same = got[1] == want[1]
        assert same.float().mean() > 0.98
        torch.testing.assert_close(got[0][same], want[0][same], rtol=1e-5, atol=1e-12)
        scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(
            MODES[mode].get("norm_type", "softmax"), F.softplus(logits).sqrt()
        )
        choice = scores if bias is None else scores + bias
        one, other = (choice.gather(1, experts.long())[~same] for _, experts in (got, want))
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_equal_scores_are_chosen_as_torch_topk_does(isa: str, mode: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for levels in (1, 2, 3, 9, 60):  # so many different logits a row: ties in, at and below the chosen
        logits = torch.randint(0, levels, (50, 256), generator=generator) / 4.0
        got, want = (each.moe_gating_top_k(logits, **MODES[mode]) for each in (cpu, reference))
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=0)


@pytest.mark.parametrize("norm_type", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [{}, {"k_group": 4, "group_count": 8}])
def test_infinities_and_nan_do_as_in_torch(isa: str, norm_type: str, groups: dict[str, int]) -> None:
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    logits[0, 5] = math.nan
    logits[1] = math.nan
    logits[2, 7] = math.inf
    logits[3, 9] = -math.inf
    logits[4] = -math.inf
    logits[5, ::2] = -math.inf
    logits[6, :30] = 3e38
    logits[7] = -3e38
    logits[8, 60:] = math.nan
    got, want = (e.moe_gating_top_k(logits, 4, norm_type=norm_type, **groups) for e in (cpu, reference))
    torch.testing.assert_close(got[0], want[0], equal_nan=True, rtol=2e-6, atol=1e-12)
    assert torch.equal(got[1], want[1])


def test_a_row_does_not_depend_on_the_others_or_on_threads(isa: str) -> None:
    logits = torch.randn(50, 256, generator=torch.Generator().manual_seed(3))
    rows = [cpu.moe_gating_top_k(row[None], **DEEPSEEK_V3) for row in logits]
    alone = [torch.cat(each) for each in zip(*rows, strict=True)]
    for threads in (1, 3):
        cpu.set_num_threads(threads)
        together = cpu.moe_gating_top_k(logits, **DEEPSEEK_V3)
        assert torch.equal(together[0], alone[0])
        assert torch.equal(together[1], alone[1])
    cpu.set_num_threads(1)
    strided = torch.cat((logits, logits), 1)[:, :256]
    assert torch.equal(cpu.moe_gating_top_k(strided, **DEEPSEEK_V3)[1], together[1])
    assert cpu.moe_gating_top_k(logits[:0], **DEEPSEEK_V3)[0].shape == (0, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 257}, "k is 257"),
        ({"k": 2, "group_count": 3}, "256 experts cannot be 3 groups"),
        ({"k": 2, "group_count": 4, "k_group": 5}, "4 groups of which 5 are kept"),
        ({"k": 2, "group_count": 256}, "a group of 1 has no two best"),
        ({"k": 2, "bias": torch.zeros(5)}, "bias must be"),
        ({"k": 2, "norm_type": "relu"}, "norm_type must be one of softmax, sigmoid, sqrtsoftplus, not 'relu'"),
        ({"k": 2, "tid2eid": torch.zeros(9, 2, dtype=torch.int32)}, "tid2eid needs input_ids"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu.moe_gating_top_k(torch.zeros(3, 256), **arguments)
