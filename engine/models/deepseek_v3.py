"""DeepSeek-V3 and R1: latent attention; after some dense layers, experts in groups beside one that every token takes.

Layers for multi-token prediction, which checkpoints hold behind the others, are not used.
"""

from __future__ import annotations

import logging

from engine.models.decoder import Decoder, Layer
from engine.models.expert_mlp import is_sparse, read_expert_mlp
from engine.models.gated_mlp import read_gated_mlp
from engine.models.latent_attention import read_latent_attention
from engine.models.projections import Reader
from engine.rope import Rotary

_log = logging.getLogger(__name__)


def read_deepseek_v3(reader: Reader) -> Decoder:
    config = reader.config
    assert config.latent is not None
    gated_rotation = reader.gated_rotation(config.intermediate_size)

    def read_layer(index: int) -> Layer:
        name = f"model.layers.{index}"
        attention, input_norm = read_latent_attention(
            reader,
            f"{name}.self_attn",
            reader.norm(f"{name}.input_layernorm", config.hidden_size),
            reader.latent_form,
        )
        post_norm = reader.norm(f"{name}.post_attention_layernorm", config.hidden_size)
        if is_sparse(config, index):
            experts, post_norm = read_expert_mlp(reader, name, post_norm)
            return Layer(input_norm=input_norm, attention=attention, post_norm=post_norm, mlp=experts)
        mlp, post_norm = read_gated_mlp(reader, f"{name}.mlp", post_norm, config.intermediate_size, gated_rotation)
        return Layer(input_norm=input_norm, attention=attention, post_norm=post_norm, mlp=mlp)

    if any(name.startswith(f"model.layers.{config.num_layers}.") for name in reader.checkpoint.names):
        _log.info("layer %d of the checkpoint predicts further tokens: it is ignored", config.num_layers)
    return Decoder.read(reader, Rotary(config.rope, config.latent.rope_dim), read_layer)
