"""DeepSeek-V4: attention over windows and compressed entries, experts in every layer, four streams of residuals.

Weights of norms are fp32, as published. Layers for multi-token prediction, which checkpoints hold behind the others,
are not used.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from engine.models.compressed_attention import read_compressed_attention
from engine.models.deepseek_v4_names import ignored, locate
from engine.models.expert_mlp import read_expert_mlp
from engine.models.int8_weights import turn
from engine.models.projections import Reader
from engine.models.streams import Connection, StreamDecoder, StreamLayer
from engine.rope import Rotary

_log = logging.getLogger(__name__)


def read_deepseek_v4(reader: Reader) -> StreamDecoder:
    config, compressed, moe = reader.config, reader.config.compressed, reader.config.moe
    assert compressed is not None
    assert moe is not None
    for name in ignored(reader.checkpoint, config.num_layers):
        _log.info("%s of the checkpoint predicts further tokens: it is ignored", name)
    reader.checkpoint = reader.checkpoint.renamed(locate(config, reader.checkpoint))
    hidden, streams = config.hidden_size, compressed.streams

    def read_connection(name: str, outputs: int, scales: int) -> Connection:
        fn = reader.checkpoint.take(f"{name}fn", (outputs, streams * hidden), torch.float32)
        if reader.is_turned:
            fn = turn(fn.unflatten(1, (streams, hidden))).flatten(1)
        return Connection(
            ops=reader.ops,
            fn=reader.ops.pack_linear(fn, None),
            scale=reader.checkpoint.take(f"{name}scale", (scales,), torch.float32),
            base=reader.checkpoint.take(f"{name}base", (outputs,), torch.float32),
            ones=torch.ones(streams * hidden),
            norm_eps=config.rms_norm_eps,
        )

    def read_layer(index: int) -> StreamLayer:
        name = f"model.layers.{index}"
        attention, input_norm = read_compressed_attention(
            reader,
            f"{name}.self_attn",
            reader.norm(f"{name}.input_layernorm", hidden, torch.float32),
            compressed.kinds[index],
        )
        mlp, post_norm = read_expert_mlp(
            reader,
            name,
            reader.norm(f"{name}.post_attention_layernorm", hidden, torch.float32),
            by_token=moe.hash_layers[index],
        )
        return StreamLayer(
            attention_connection=read_connection(f"{name}.attn_hc.", streams * (2 + streams), 3),
            input_norm=input_norm,
            attention=attention,
            mlp_connection=read_connection(f"{name}.ffn_hc.", streams * (2 + streams), 3),
            post_norm=post_norm,
            mlp=mlp,
        )

    embedding = reader.part("embedding", reader.embedding)
    layers = [reader.layer(index, read_layer) for index in range(config.num_layers)]
    head, final_norm = reader.part(
        "head", lambda: reader.head(embedding, reader.norm("model.norm", hidden, torch.float32)), of_one_format=False
    )
    return StreamDecoder(
        config,
        reader.ops,
        (Rotary(compressed.plain_rope, compressed.rope_dim), Rotary(config.rope, compressed.rope_dim)),
        embedding,
        layers,
        reader.part("merge", partial(read_connection, "model.hc_head.hc_", streams, 1)),
        head,
        final_norm,
    )
