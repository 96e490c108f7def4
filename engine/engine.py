"""One model on one device: its weights, its KV cache, and the forward pass over packed batches.

Not thread safe: after `load` everything here belongs to the worker's device thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import memory, models, ops, sampling
from engine.batch import Batch, BatchItem, DecodeBatches
from engine.block_pool import BlockPool
from engine.kv_cache import KV_DTYPES, Allocate, KvCache, division
from engine.loading import Checkpoint
from engine.model_config import ModelConfig
from engine.models.latent_attention import FORMS
from engine.packed_weights import UNSHARED, Parts, shared_parts, source_digest
from engine.quantization import AS_LOADED, AUTO, WEIGHT_FORMATS, choose_weights
from engine.state_pool import StatePool
from twinpool.errors import ConfigError

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = "1"  # of everything that two workers must agree on beside weights and layout
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BLOCK_SIZE = 64  # tokens, where nothing else is asked for or needed


class Engine:
    """Made by `load`. `cache` holds the rows; `blocks` and `states` say who owns those of blocks and of sequences.

    Peers of equal `fingerprint` share rows.
    """

    def __init__(
        self, config: ModelConfig, model: models.Model, cache: KvCache, *, model_name: str, fingerprint: str
    ) -> None:
        self.config = config
        self.cache = cache
        self.blocks = BlockPool(cache.num_rows, cache.layout.block_size)
        self.states = StatePool(cache)
        self.model_name = model_name
        self.fingerprint = fingerprint
        self._model = model
        self._batches = DecodeBatches(cache.layout.block_size)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        backend: str = "cpu",
        dtype: str = "bf16",
        kv_dtype: str = "int8",
        weights: str = AS_LOADED,
        fastest_weights: str = AS_LOADED,
        latent_form: str = "absorbed",
        block_size: int = 0,
        memory_bytes: int,
        max_sequences: int = 64,
        threads: int = 0,
        allocate: Allocate | None = None,
        packed_weights: Path | None = None,
    ) -> Engine:
        """Reads a Hugging Face directory and allocates a cache of `memory_bytes` (beside the weights).

        backend: a key of engine.ops; dtype: of weights and activations; weights: how matrices are held, one of
        engine.quantization.WEIGHT_FORMATS, or AUTO for fastest_weights where its quality is known; latent_form: in
        which form latent attention is computed, one of engine.models.latent_attention.FORMS; block_size: tokens a
        block, 0: BLOCK_SIZE or what the model needs;
        max_sequences: how many hold a row of their own, where the model has such rows (see kv_cache.division); threads:
        that one operator may use, 0: one a core; allocate: where the cache's memory comes from, when not from torch;
        packed_weights: the folder through which workers of this host share weights (see engine.packed_weights), None:
        they do not.
        Raises ConfigError for a directory, option or memory size that cannot work, before anything big is read where
        possible.
        """
        _check_choice("dtype", dtype, DTYPES)
        _check_choice("kv_dtype", kv_dtype, KV_DTYPES)
        _check_choice("weights", weights, (AUTO, *WEIGHT_FORMATS))
        _check_choice("latent_form", latent_form, FORMS)
        operators = ops.load(backend)
        operators.set_num_threads(threads or len(os.sched_getaffinity(0)))
        config = ModelConfig.read(model_dir)
        asked = weights
        weights = choose_weights(asked, fastest=fastest_weights, model_type=config.model_type, dtype=dtype)
        logger.info("matrices are held as %s (--weights %s)", weights, asked)
        layout = models.cache_layout(config, _block_size(block_size, models.block_granularity(config)), kv_dtype)
        checkpoint = Checkpoint(model_dir)
        _check_memory(config.num_parameters * (DTYPES[dtype].itemsize if weights == AS_LOADED else 1), memory_bytes)
        with torch.inference_mode():
            num_rows, num_states = division(layout, memory_bytes, max_sequences)
            cache = KvCache(layout, num_rows, num_states=num_states, allocate=allocate)
            # Both int8 formats hold the same numbers: rows of either come from the same model.
            held = f"dtype={dtype}" if weights == AS_LOADED else f"dtype={dtype} weights=int8"
            digest = checkpoint.digest()
            read = partial(
                models.read,
                *(config, checkpoint, operators, DTYPES[dtype]),
                int8_cache=kv_dtype == "int8",
                weights=weights,
                latent_form=latent_form,
            )
            parts: Parts = UNSHARED
            if packed_weights is not None and operators.SHARES_WEIGHTS:
                keys = "int8" if kv_dtype == "int8" else "float"  # which keys are changed to fit
                form = () if config.latent is None else (latent_form,)
                name = "-".join((digest[:16], held.replace("=", "-").replace(" ", "-"), f"kv-{keys}", *form))
                all_of_it = (digest, held, keys, *form, config, torch.__version__, source_digest())
                parts = shared_parts(packed_weights, name, "\n".join(map(str, all_of_it)), lambda to: read(parts=to))
            model = read(parts=parts)
        identity = "\n".join((digest, layout.describe(), held, PROTOCOL_VERSION))
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return cls(config, model, cache, model_name=model_dir.resolve().name, fingerprint=fingerprint)

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Runs one step: hidden states [T, hidden] after the final norm; the batch's K and V are in the cache.

        on_layer(i) is called, on this thread, as soon as layer i's rows hold the batch's K and V for good.
        """
        return self._model.forward(batch, self.cache.views, on_layer)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden], rows of what `forward` returned -> logits [n, vocab] fp32."""
        return self._model.logits(hidden)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights that a step with logits reads: all but the table of embeddings."""
        return self._model.weight_bytes

    @property
    def decoder(self) -> Any:
        """All layers as one call of the backend, whose steps it can record; None where it has no such thing."""
        return self._model.decoder(self.cache.views)

    @torch.inference_mode()
    def next_tokens(
        self, hidden: torch.Tensor, rows: Sequence[sampling.SampleRow], sources: Sequence[int] | None = None
    ) -> list[sampling.Sampled]:
        """Logits and sampling in one: the next token of each row, from hidden[sources[i]] (None: from hidden[i]).

        hidden [n, hidden]. The tokens are those that `sample` draws from `logits`.
        """
        places = range(len(rows)) if sources is None else sources
        tokens, logits = self._model.tokens(hidden, [sampling.plain_draw(row) for row in rows], places)
        eos, max_context = self.config.eos_token_ids, self.config.max_context
        return sampling.complete(logits, tokens, rows, places, eos_token_ids=eos, max_context=max_context)

    @torch.inference_mode()
    def decode(self, items: Sequence[BatchItem], rows: Sequence[sampling.SampleRow]) -> list[sampling.Sampled]:
        """One step of decoding: each sequence's last token through the layers, and its next one.

        Where the backend has all layers as one call, a step makes no tensors, and is two native calls, unless a row
        needs its logits looked at (see sampling.plain_draw).
        """
        decoder = self.decoder
        if decoder is None:
            return self.next_tokens(self.forward(Batch.build(items, self.blocks.block_size)), rows)
        return self.next_tokens(decoder.decode(self._batches.build(items)), rows)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[sampling.SampleRow]) -> list[sampling.Sampled]:
        """Draws the next token of each row; see engine.sampling."""
        return sampling.sample(
            logits, rows, eos_token_ids=self.config.eos_token_ids, max_context=self.config.max_context
        )


def _check_choice(field: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"unknown {field} {value!r}: choose one of {', '.join(allowed)}", field=field)


def _block_size(wanted: int, granularity: int) -> int:
    """The block size that is used. granularity: what it must be a multiple of. Raises ConfigError."""
    if wanted < 0 or wanted % granularity:
        raise ConfigError(
            f"block_size is {wanted}: allowed are multiples of {granularity}, and 0 for what suits the model",
            field="block_size",
        )
    return wanted or -(-BLOCK_SIZE // granularity) * granularity


def _check_memory(weight_bytes: int, cache_bytes: int) -> None:
    """The kernel hands out pages only when they are touched: a worker that asks for too much would die much later."""
    available = memory.available_bytes()
    if available is not None and weight_bytes + cache_bytes > available:
        raise ConfigError(
            f"too little memory: weights take {weight_bytes / 2**20:,.1f} MiB and the KV cache "
            f"{cache_bytes / 2**20:,.1f} MiB, but {available / 2**20:,.1f} MiB are available; "
            "lower --memory or serve a smaller model",
            field="memory",
        )
