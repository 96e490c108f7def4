"""How matrices are held: as they come, or as int8 with one scale an output channel.

    w[n, k] ~ codes[n, k] * scales[n]          scales[n] = max |w[n, :]| / 127

Both int8 formats hold the same codes and scales, so that workers of either compute the same model. They differ in what
the codes are multiplied with: activations as they come (w8a16: decode, where reading weights is what takes the time) or
activations quantized token by token in the same way (w8a8: prefill, where multiplying is).
"""

from __future__ import annotations

import torch

AS_LOADED, W8A16, W8A8 = "bf16", "w8a16", "w8a8"
WEIGHT_FORMATS = (AS_LOADED, W8A16, W8A8)
AUTO = "auto"
MEASURED = ("qwen2",)  # families with a model of which int8 was found good enough, see bench/README.md


def choose_weights(wanted: str, *, fastest: str, model_type: str, dtype: str) -> str:
    """One of WEIGHT_FORMATS for `wanted`, which may be AUTO: `fastest`, where its quality is known.

    model_type: of the model's config.json; dtype: of activations, as the engine's: who asks for fp32 wants precision.
    """
    if wanted != AUTO:
        return wanted
    return fastest if model_type in MEASURED and dtype == "bf16" else AS_LOADED


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 over the last axis: x [N, K] -> (codes int8 [N, K], scales fp32 [N]).

    scale = max|x| / 127; code = x / scale to the nearest even integer. A row of zeros has the scale 0 and codes of
    zero; a row that is not finite has a scale that is not finite and codes of zero.
    """
    x32 = x.float()
    scales = x32.abs().amax(-1) / 127
    usable = ((scales > 0) & scales.isfinite()).unsqueeze(-1)
    codes = torch.where(usable, x32 / scales.unsqueeze(-1), 0).round().clamp(-127, 127).to(torch.int8)
    return codes, scales
