"""Which format of weights is taken when none is asked for."""

from __future__ import annotations

import pytest

from engine.quantization import AS_LOADED, AUTO, MEASURED, W8A8, W8A16, WEIGHT_FORMATS, choose_weights


@pytest.mark.parametrize("wanted", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_is_asked_for_is_taken(wanted: str, dtype: str) -> None:
    assert choose_weights(wanted, fastest=W8A8, model_type="llama", dtype=dtype) == wanted
    assert choose_weights(wanted, fastest=W8A8, model_type="mixtral", dtype=dtype) == wanted


@pytest.mark.parametrize("fastest", [W8A8, W8A16])
def test_auto_is_int8_only_where_its_quality_was_measured(fastest: str) -> None:
    assert MEASURED == ("qwen2",)  # see bench/README.md
    for family in MEASURED:
        assert choose_weights(AUTO, fastest=fastest, model_type=family, dtype="bf16") == fastest
        assert choose_weights(AUTO, fastest=fastest, model_type=family, dtype="fp32") == AS_LOADED
    for family in ("llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v4"):
        assert choose_weights(AUTO, fastest=fastest, model_type=family, dtype="bf16") == AS_LOADED
