"""All layers of a decoder in one native call a step (csrc/decoder.cpp), with the bits of the single operators.

A step needs no tensor beyond its input and its output (`decode` not even those): what the layers work on lies in one
buffer that is kept. Nor has it a trip through Python for each operator, which is a tenth of a step of a small dense
model at batch 1, and a fifth of one with experts.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.ops import native
from engine.ops.cpu_attention import cache_args
from engine.ops.cpu_latent import HEADS_AT_ONCE, entry_args
from engine.ops.cpu_moe import SCORES
from engine.ops.cpu_tensors import dtype_code

if TYPE_CHECKING:
    from engine.batch import Batch
    from engine.model_config import ModelConfig
    from engine.models.decoder import Layer
    from engine.models.expert_mlp import ExpertMlp
    from engine.models.gated_mlp import GatedMlp
    from engine.models.grouped_attention import GroupedAttention
    from engine.models.latent_attention import LatentAttention
    from engine.rope import Rotary

KINDS = ("linear", "attention", "kv_access", "moe", "other")  # of events, in the order of decoder.h
_EVENTS_A_LAYER = 20  # more than a layer has


def can_decode(config: ModelConfig, layers: Sequence[Layer]) -> bool:
    """Whether all of the model's sizes fill whole words, and latent attention, if it has such, is absorbed."""
    sizes = [config.hidden_size, config.intermediate_size, 0 if config.moe is None else config.moe.shared_size]
    if config.latent is None:
        sizes.append(config.head_dim)
    else:
        latent = config.latent
        sizes += [latent.q_rank or 0, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.v_dim]
        if layers[0].attention.key_up is None:
            return False
    return not any(size % 4 for size in sizes)


class Decoder:
    """The layers of one model over one cache. Not thread safe: steps use one workspace."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        views: Sequence[Any],
        embedding: torch.Tensor,
        rotary: Rotary,
    ) -> None:
        library = native.library()
        if library is None:
            raise ImportError("the native kernels are not built")
        self._run, self._bytes_for = library.twinpool_decoder, library.twinpool_decoder_bytes
        self._embedding, self._rotary = embedding.contiguous(), rotary
        self._kept_alive = (layers, final_norm, views)  # what the structures point into
        self._layers = (native.LayerArgs * config.num_layers)()
        for index, (args, layer, view) in enumerate(zip(self._layers, layers, views, strict=True)):
            args.input_norm, args.post_norm = layer.input_norm.data_ptr(), layer.post_norm.data_ptr()
            if config.latent is None:
                args.grouped = ctypes.pointer(_grouped(layer.attention, view))
            else:
                args.latent = ctypes.pointer(_latent(layer.attention, view))
            gated = layer.mlp
            if config.moe is not None and config.moe.sparse_layers[index]:
                args.experts, gated = ctypes.pointer(_experts(layer.mlp)), layer.mlp.shared
            if gated is not None:
                args.gated = ctypes.pointer(_gated(gated))
        self._args = native.DecoderArgs(
            dtype=dtype_code(final_norm, "final_norm"),
            num_layers=config.num_layers,
            eps=config.rms_norm_eps,
            rope_dim=config.head_dim if config.latent is None else config.latent.rope_dim,
            hidden=config.hidden_size,
            layers=self._layers,
            final_norm=final_norm.data_ptr(),
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._hidden = torch.empty(0, config.hidden_size, dtype=embedding.dtype)
        self._shown = self._hidden
        self._starts, self._lengths = array("i"), array("i")
        self._tokens = 0  # that the workspace is large enough for
        self._events: Any = None
        self._chosen_experts: torch.Tensor | None = None  # uint8 [layers, experts]
        self._sparse_layers = () if config.moe is None else config.moe.sparse_layers
        self._num_experts = 0 if config.moe is None else config.moe.num_experts
        self._num_events = 0

    def forward(
        self,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        on_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """residual: the embeddings [T, hidden], overwritten; cos, sin fp32 [T, rope_dim / 2] -> [T, hidden] normed."""
        out = torch.empty_like(residual)
        step = self._step(batch, out, cos, sin)
        step.residual = residual.data_ptr()
        run, end = self._run, self._args.num_layers + 1
        if on_layer is None:
            run(self._args, step, 0, end)
        else:
            for stage in range(end):
                run(self._args, step, stage, stage + 1)
                if stage < self._args.num_layers:
                    on_layer(stage)
        self._num_events = step.num_events
        return out

    def decode(self, batch: Batch) -> torch.Tensor:
        """The same from token ids and positions on, in buffers that are kept: hidden states good until the next call.

        Makes no tensor unless the batch or a position is larger than any before. An id that is none of the vocabulary
        gives NaN.
        """
        tokens = batch.num_tokens
        if tokens > len(self._hidden):
            self._hidden = torch.empty(tokens, self._embedding.shape[1], dtype=self._embedding.dtype)
        if tokens != len(self._shown):
            self._shown = self._hidden[:tokens]
        step = self._step(batch, self._hidden, *self._rotary.table(max(batch.context_lens)))
        step.token_ids, step.positions = batch.token_ids.data_ptr(), batch.positions.data_ptr()
        step.embedding, step.vocab = self._embedding.data_ptr(), len(self._embedding)
        self._run(self._args, step, 0, self._args.num_layers + 1)
        self._num_events = step.num_events
        return self._shown

    def _step(self, batch: Batch, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> native.StepArgs:
        if batch.num_tokens > self._tokens:
            num_bytes = self._bytes_for(self._args, batch.num_tokens)
            self._workspace, self._tokens = torch.empty(num_bytes + 64, dtype=torch.uint8), batch.num_tokens
        self._starts, self._lengths = array("i", batch.query_start), array("i", batch.context_lens)  # must outlive this
        return native.StepArgs(
            tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            slots=batch.slots.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            block_tables_stride=batch.block_tables.stride(0) * 4,
            query_start=self._starts.buffer_info()[0],
            context_lens=self._lengths.buffer_info()[0],
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            out=out.data_ptr(),
            workspace=(self._workspace.data_ptr() + 63) // 64 * 64,
            events=self._events,
            chosen_experts=None if self._chosen_experts is None else self._chosen_experts.zero_().data_ptr(),
        )

    def record(self, on: bool) -> None:
        """From now on every step notes when each operator ran and which experts were chosen; `events` and
        `chosen_experts` have those of the last one."""
        if self._num_experts:
            shape = (self._args.num_layers, self._num_experts)
            self._chosen_experts = torch.zeros(shape, dtype=torch.uint8) if on else None
        self._events = (native.Event * (_EVENTS_A_LAYER * (self._args.num_layers + 1)))() if on else None

    @property
    def events(self) -> list[tuple[str, int, int, int]]:
        """(kind, layer, begin, end) of every operator of the last step, in ns of the monotonic clock."""
        events = self._events or ()
        return [(KINDS[e.kind], e.layer, e.begin_ns, e.end_ns) for e in events[: self._num_events]]

    @property
    def chosen_experts(self) -> list[list[int]]:
        """Of every layer with experts, those that any token of the last step was sent to."""
        if self._chosen_experts is None:
            return []
        return [
            row.nonzero().flatten().tolist()
            for row, is_sparse in zip(self._chosen_experts, self._sparse_layers, strict=True)
            if is_sparse
        ]


def _grouped(attention: GroupedAttention, view: Any) -> native.GroupedPart:
    config = attention.config
    part = native.GroupedPart(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        q_norm=_address(attention.q_norm),
        k_norm=_address(attention.k_norm),
        qkv=_pointer(attention.qkv),
        output=_pointer(attention.output),
        cache=cache_args(view),
    )
    if attention.rotations is not None:
        part.q_rotation, part.k_rotation = map(_pointer, attention.rotations)
    return part


def _latent(attention: LatentAttention, view: Any) -> native.LatentPart:
    return native.LatentPart(
        num_heads=attention.num_heads,
        heads_at_once=min(attention.num_heads, HEADS_AT_ONCE),
        scale=attention.latent.scale,
        eps=attention.norm_eps,
        q_a_norm=_address(attention.q_a_norm),
        kv_a_norm=_address(attention.kv_a_norm),
        q_a=_pointer(attention.q_a),
        q_b=_pointer(attention.q_b),
        kv_a=_pointer(attention.kv_a),
        output=_pointer(attention.output),
        key_up=attention.key_up.args,
        value_up=attention.value_up.args,
        cache=entry_args(view),
    )


def _gated(mlp: GatedMlp) -> native.GatedPart:
    return native.GatedPart(*map(_pointer, (mlp.gate_up, mlp.down, mlp.rotation)))


def _experts(mlp: ExpertMlp) -> native.ExpertPart:
    moe = mlp.moe
    return native.ExpertPart(
        router=_pointer(mlp.router),
        score=SCORES.index(moe.scoring),
        k=moe.experts_per_token,
        bias=_address(mlp.bias),
        num_groups=moe.num_groups,
        groups_kept=moe.groups_kept,
        renormalize=moe.renormalize,
        scale=moe.scaling,
        eps=moe.eps,
        experts=mlp.experts.args,
    )


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _pointer(packed: Any) -> Any:
    """To the arguments of a packed matrix, or null."""
    return None if packed is None else ctypes.pointer(packed.args)
