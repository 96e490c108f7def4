"""The dense decoders Llama, Qwen2 and Qwen3: grouped-query attention and a gated feed-forward block in every layer.

They differ in data only (biases, query and key norms, rope kind, sizes), which ModelConfig carries.
"""

from __future__ import annotations

from engine.models.decoder import Decoder, Layer
from engine.models.gated_mlp import read_gated_mlp
from engine.models.grouped_attention import pack_rotations, read_grouped_attention
from engine.models.projections import Reader
from engine.rope import Rotary


def read_dense(reader: Reader) -> Decoder:
    config = reader.config
    rotations, gated_rotation = pack_rotations(reader), reader.gated_rotation(config.intermediate_size)

    def read_layer(index: int) -> Layer:
        name = f"model.layers.{index}"
        attention, input_norm = read_grouped_attention(
            reader, f"{name}.self_attn", reader.norm(f"{name}.input_layernorm", config.hidden_size), rotations
        )
        post_norm = reader.norm(f"{name}.post_attention_layernorm", config.hidden_size)
        mlp, post_norm = read_gated_mlp(reader, f"{name}.mlp", post_norm, config.intermediate_size, gated_rotation)
        return Layer(input_norm=input_norm, attention=attention, post_norm=post_norm, mlp=mlp)

    return Decoder.read(reader, Rotary(config.rope, config.head_dim), read_layer)
