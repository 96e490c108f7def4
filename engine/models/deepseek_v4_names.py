"""Where DeepSeek-V4's tensors lie: under the names that DeepSeek publishes, or those of transformers.

The reader asks by one set of names, transformers' with every expert by itself. Published files call them otherwise;
transformers' own stack the experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from engine.loading import Checkpoint, Stored
from engine.model_config import ModelConfig

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_PUBLISHED = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.self_attn\.sinks$", ".attn.attn_sink"),
        (r"\.self_attn\.q_a_norm\.", ".attn.q_norm."),
        (r"\.compressor\.indexer\.(q_b_proj\.)", r".indexer.\1"),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.self_attn\.", ".attn."),
        (r"(\.attn\..*?\.?)(q_a|q_b|kv|o_a|o_b)_proj\.", r"\1w\2."),
        (r"(\.compressor\.)gate_proj\.", r"\1wgate."),
        (r"\.mlp\.", ".ffn."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"(experts\..*)gate_proj\.", r"\1w1."),
        (r"(experts\..*)down_proj\.", r"\1w2."),
        (r"(experts\..*)up_proj\.", r"\1w3."),
    )
]


def published(name: str) -> str:
    """DeepSeek's name of what transformers calls `name`."""
    for pattern, replacement in _PUBLISHED:
        name = pattern.sub(replacement, name)
    return name


def locate(config: ModelConfig, checkpoint: Checkpoint) -> Callable[[str], Stored]:
    """Says where this checkpoint keeps the tensors, whichever names it goes by."""
    if "embed.weight" in checkpoint:
        return lambda name: Stored(published(name))
    moe = config.moe
    assert moe is not None
    inner, hidden, count = moe.inner_size, config.hidden_size, moe.num_experts
    rows = {"gate": slice(0, inner), "up": slice(inner, 2 * inner)}

    def find(name: str) -> Stored:
        expert = _EXPERT.fullmatch(name)
        if expert is None or name in checkpoint:
            return Stored(name)
        experts, index, matrix = expert[1], int(expert[2]), expert[3]
        if matrix == "down":
            return Stored(f"{experts}.down_proj", (count, hidden, inner), (index,))
        return Stored(f"{experts}.gate_up_proj", (count, 2 * inner, hidden), (index, rows[matrix]))

    return find


def ignored(checkpoint: Checkpoint, num_layers: int) -> list[str]:
    """What predicts further tokens, by its beginning: it is not used."""
    found = {match[0] for name in checkpoint.names if (match := re.match(r"(model\.)?mtp\.\d+", name))}
    extra = {match[0] for name in checkpoint.names if (match := re.match(r"(model\.)?layers\.(\d+)", name))}
    return sorted(found | {each for each in extra if int(each.rsplit(".", 1)[1]) >= num_layers})
