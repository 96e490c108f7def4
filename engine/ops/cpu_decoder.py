"""All layers of a dense decoder in one native call a step (csrc/decoder.cpp), with the bits of the single operators.

A step needs no tensor beyond its input and its output (`decode` not even those): what the layers work on lies in one
buffer that is kept. Nor has it a trip through Python for each operator, which at batch 1 of a small model is a tenth of
the step.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.kv_cache import KvView
from engine.ops import native

if TYPE_CHECKING:
    from engine.batch import Batch
    from engine.model_config import ModelConfig
    from engine.models.decoder import Layer
    from engine.rope import Rotary

KINDS = ("linear", "attention", "kv_access", "other")  # of events, in the order of decoder.cpp
_EVENTS_A_LAYER = 20  # more than a layer has


class Decoder:
    """The layers of one model over one cache. Not thread safe: steps use one workspace."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        rotations: Sequence[Any] | None,
        gated_rotation: Any,
        views: Sequence[KvView],
        cache_args: Callable[[KvView], native.KvCacheArgs],
        dtype_code: int,
        embedding: torch.Tensor,
        rotary: Rotary,
    ) -> None:
        library = native.library()
        if library is None:
            raise ImportError("the native kernels are not built")
        self._run, self._bytes_for = library.twinpool_decoder, library.twinpool_decoder_bytes
        self._embedding, self._rotary = embedding.contiguous(), rotary
        self._kept_alive = (layers, final_norm, rotations, gated_rotation, views)  # what the structures point into
        self._layers = (native.LayerArgs * config.num_layers)()
        for args, layer, view in zip(self._layers, layers, views, strict=True):
            attention, mlp = layer.attention, layer.mlp
            args.input_norm, args.post_norm = layer.input_norm.data_ptr(), layer.post_norm.data_ptr()
            if attention.q_norm is not None:
                args.q_norm, args.k_norm = attention.q_norm.data_ptr(), attention.k_norm.data_ptr()
            args.qkv, args.output = ctypes.pointer(attention.qkv.args), ctypes.pointer(attention.output.args)
            args.gate_up, args.down = ctypes.pointer(mlp.gate_up.args), ctypes.pointer(mlp.down.args)
            args.cache = cache_args(view)
        self._args = native.DecoderArgs(
            dtype=dtype_code,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=self._layers,
            final_norm=final_norm.data_ptr(),
        )
        if rotations is not None:
            self._args.q_rotation, self._args.k_rotation = (ctypes.pointer(each.args) for each in rotations)
        if gated_rotation is not None:
            self._args.gated_rotation = ctypes.pointer(gated_rotation.args)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._hidden = torch.empty(0, config.hidden_size, dtype=embedding.dtype)
        self._shown = self._hidden
        self._starts, self._lengths = array("i"), array("i")
        self._tokens = 0  # that the workspace is large enough for
        self._events: Any = None
        self._num_events = 0

    def forward(
        self,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        on_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """residual: the embeddings [T, hidden], overwritten; cos, sin fp32 [T, head_dim / 2] -> [T, hidden] normed."""
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
        )

    def record(self, on: bool) -> None:
        """From now on every step notes when each operator ran; `events` has those of the last one."""
        self._events = (native.Event * (_EVENTS_A_LAYER * (self._args.num_layers + 1)))() if on else None

    @property
    def events(self) -> list[tuple[str, int, int, int]]:
        """(kind, layer, begin, end) of every operator of the last step, in ns of the monotonic clock."""
        events = self._events or ()
        return [(KINDS[e.kind], e.layer, e.begin_ns, e.end_ns) for e in events[: self._num_events]]
