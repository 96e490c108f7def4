"""Finds and loads the shared library of native CPU kernels (csrc/), and chooses its instruction set.

The environment variable TWINPOOL_ISA, one of ISAS, overrides the choice of the best one.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

from twinpool import sources
from twinpool.errors import ConfigError

ISAS = ("generic", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
EMULATED = "amx-emulated"  # the kernels of "amx" on a model of its tiles in software: for tests, never the best choice

_log = logging.getLogger(__name__)

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class KvCacheArgs(ctypes.Structure):
    """struct KvCacheArgs of kernels.h."""

    _fields_ = (
        ("dtype", _INT),
        ("k", _POINTER),
        ("v", _POINTER),
        ("k_scale", _POINTER),
        ("v_scale", _POINTER),
        ("row_bytes", _SIZE),
        ("num_kv_heads", _INT),
        ("block_size", _INT),
        ("head_dim", _INT),
    )


class PackedLinear(ctypes.Structure):
    """struct PackedLinear of kernels.h."""

    _fields_ = (
        ("format", _INT),
        ("dtype", _INT),
        ("steps", _SIZE),
        ("in_features", _SIZE),
        ("out_features", _SIZE),
        ("panels", _POINTER),
        ("scales", _POINTER),
        ("column_sums", _POINTER),
        ("bias", _POINTER),
    )


_CACHE = ctypes.POINTER(KvCacheArgs)
_LINEAR = ctypes.POINTER(PackedLinear)


class LatentArgs(ctypes.Structure):
    """struct LatentArgs of kernels.h."""

    _fields_ = (
        ("dtype", _INT),
        *((name, _POINTER) for name in ("latents", "keys", "scales")),
        ("row_bytes", _SIZE),
        *((name, _INT) for name in ("block_size", "rank", "key_dim")),
        ("q", _POINTER),
        ("q_token_stride", _SIZE),
        ("q_head_stride", _SIZE),
        ("num_heads", _INT),
        ("heads_at_once", _INT),
        ("block_tables", _POINTER),
        ("block_tables_stride", _SIZE),
        ("context_lens", _POINTER),
        ("scale", _FLOAT),
        ("out", _POINTER),
    )


class EntryArgs(ctypes.Structure):
    """struct EntryArgs of compressed.h."""

    _fields_ = (
        ("dtype", _INT),
        *((name, _POINTER) for name in ("latents", "keys", "scales")),
        *((name, _SIZE) for name in ("row_bytes", "item_stride")),
        *((name, _INT) for name in ("block_size", "rank", "key_dim")),
    )


class StoreLatentsArgs(ctypes.Structure):
    """struct StoreLatentsArgs of compressed.h."""

    _fields_ = (
        ("entries", EntryArgs),
        ("dtype", _INT),
        *((name, _POINTER) for name in ("latents", "keys")),
        *((name, _SIZE) for name in ("latent_stride", "key_stride")),
        ("slots", _POINTER),
    )


class SharedArgs(ctypes.Structure):
    """struct SharedArgs of compressed.h."""

    _fields_ = (
        ("dtype", _INT),
        ("q", _POINTER),
        *((name, _SIZE) for name in ("q_token_stride", "q_head_stride")),
        *((name, _INT) for name in ("num_heads", "heads_at_once", "dim")),
        ("local", _POINTER),
        ("local_stride", _SIZE),
        ("spans", _POINTER),
        ("entries", EntryArgs),
        ("slots", _POINTER),
        *((name, _SIZE) for name in ("slots_stride", "num_slots")),
        ("sinks", _POINTER),
        ("scale", _FLOAT),
        ("out", _POINTER),
    )


class IndexArgs(ctypes.Structure):
    """struct IndexArgs of compressed.h."""

    _fields_ = (
        ("dtype", _INT),
        ("q", _POINTER),
        *((name, _SIZE) for name in ("q_token_stride", "q_head_stride")),
        *((name, _INT) for name in ("num_heads", "dim")),
        ("weights", _POINTER),
        ("entries", EntryArgs),
        ("block_tables", _POINTER),
        ("block_tables_stride", _SIZE),
        *((name, _POINTER) for name in ("sequences", "visible", "scores")),
        ("scores_stride", _SIZE),
    )


class Gating(ctypes.Structure):
    """struct Gating of kernels.h."""

    _fields_ = (
        *((name, _INT) for name in ("score", "renormalize")),
        *((name, _SIZE) for name in ("num_experts", "k", "num_groups", "groups_kept")),
        *((name, _FLOAT) for name in ("scale", "eps")),
    )


class PoolArgs(ctypes.Structure):
    """struct PoolArgs of compressed.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "gates")),
        *((name, _SIZE) for name in ("count", "width")),
        ("out", _POINTER),
    )


class StreamsInArgs(ctypes.Structure):
    """struct StreamsInArgs of compressed.h."""

    _fields_ = (
        ("dtype", _INT),
        *((name, _POINTER) for name in ("x", "mixes", "scale", "base")),
        *((name, _SIZE) for name in ("streams", "width", "iterations")),
        ("eps", _FLOAT),
        *((name, _POINTER) for name in ("out", "post", "comb")),
    )


class StreamsOutArgs(ctypes.Structure):
    """struct StreamsOutArgs of compressed.h."""

    _fields_ = (
        ("dtype", _INT),
        *((name, _POINTER) for name in ("y", "x", "post", "comb")),
        *((name, _SIZE) for name in ("streams", "width")),
        ("out", _POINTER),
    )


class ExpertsArgs(ctypes.Structure):
    """struct ExpertsArgs of dispatch.h."""

    _fields_ = (
        ("num_experts", _SIZE),
        ("gate_up", _LINEAR),
        ("down", _LINEAR),
        ("gated_rotation", _LINEAR),
        ("limit", _FLOAT),
    )


class GroupedPart(ctypes.Structure):
    """struct GroupedPart of decoder.h."""

    _fields_ = (
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim")),
        ("scale", _FLOAT),
        *((name, _POINTER) for name in ("q_norm", "k_norm")),
        *((name, _LINEAR) for name in ("qkv", "output", "q_rotation", "k_rotation")),
        ("cache", KvCacheArgs),
    )


class LatentPart(ctypes.Structure):
    """struct LatentPart of decoder.h."""

    _fields_ = (
        *((name, _INT) for name in ("num_heads", "heads_at_once")),
        *((name, _FLOAT) for name in ("scale", "eps")),
        *((name, _POINTER) for name in ("q_a_norm", "kv_a_norm")),
        *((name, _LINEAR) for name in ("q_a", "q_b", "kv_a", "output", "key_up", "value_up")),
        ("cache", EntryArgs),
    )


class GatedPart(ctypes.Structure):
    """struct GatedPart of decoder.h."""

    _fields_ = tuple((name, _LINEAR) for name in ("gate_up", "down", "rotation"))


class ExpertPart(ctypes.Structure):
    """struct ExpertPart of decoder.h."""

    _fields_ = (
        ("router", _LINEAR),
        ("score", _INT),
        ("k", _SIZE),
        ("bias", _POINTER),
        *((name, _SIZE) for name in ("num_groups", "groups_kept")),
        ("renormalize", _INT),
        *((name, _FLOAT) for name in ("scale", "eps")),
        ("experts", ExpertsArgs),
    )


class LayerArgs(ctypes.Structure):
    """struct LayerArgs of decoder.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "post_norm")),
        ("grouped", ctypes.POINTER(GroupedPart)),
        ("latent", ctypes.POINTER(LatentPart)),
        ("gated", ctypes.POINTER(GatedPart)),
        ("experts", ctypes.POINTER(ExpertPart)),
    )


class DecoderArgs(ctypes.Structure):
    """struct DecoderArgs of decoder.h."""

    _fields_ = (
        *((name, _INT) for name in ("dtype", "num_layers")),
        ("eps", _FLOAT),
        ("rope_dim", _INT),
        ("hidden", _SIZE),
        ("layers", ctypes.POINTER(LayerArgs)),
        ("final_norm", _POINTER),
    )


class Event(ctypes.Structure):
    """struct Event of decoder.h."""

    _fields_ = (("kind", _INT), ("layer", _INT), ("begin_ns", _SIZE), ("end_ns", _SIZE))


class StepArgs(ctypes.Structure):
    """struct StepArgs of decoder.h."""

    _fields_ = (
        ("tokens", _SIZE),
        ("num_sequences", _INT),
        ("slots", _POINTER),
        ("block_tables", _POINTER),
        ("block_tables_stride", _SIZE),
        *((name, _POINTER) for name in ("query_start", "context_lens", "cos", "sin", "residual")),
        *((name, _POINTER) for name in ("token_ids", "positions", "embedding")),
        ("vocab", _SIZE),
        *((name, _POINTER) for name in ("out", "workspace")),
        ("events", ctypes.POINTER(Event)),
        ("num_events", _SIZE),
        ("chosen_experts", _POINTER),
    )


class TokenChoice(ctypes.Structure):
    """struct TokenChoice of kernels.h."""

    _fields_ = (
        *((name, _SIZE) for name in ("row", "top_k")),
        *((name, ctypes.c_double) for name in ("top_p", "min_p", "point")),
        ("temperature", _FLOAT),
        ("token", _INT),
    )


# Parameters as in api.cpp, compressed.cpp, moe.cpp, sampling.cpp and decoder.cpp.
_FUNCTIONS = {
    "twinpool_set_num_threads": (_INT,),
    "twinpool_linear": (_LINEAR, _POINTER, _SIZE, _SIZE, _POINTER),
    "twinpool_rms_norm": (_INT, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _FLOAT, _POINTER),
    "twinpool_rope": (_INT, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER),
    "twinpool_silu_mul": (_INT, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER),
    "twinpool_store_kv": (_CACHE, _INT, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE),
    "twinpool_attention": (
        *(_CACHE, _INT, _POINTER, _SIZE, _SIZE, _INT),
        *(_POINTER, _SIZE, _INT, _POINTER, _POINTER, _FLOAT, _POINTER),
    ),
    "twinpool_latent_attention": (ctypes.POINTER(LatentArgs), _INT, _POINTER),
    "twinpool_store_latents": (ctypes.POINTER(StoreLatentsArgs), _SIZE),
    "twinpool_shared_attention": (ctypes.POINTER(SharedArgs), _SIZE),
    "twinpool_lightning_indexer": (ctypes.POINTER(IndexArgs), _SIZE, _SIZE, _POINTER, _SIZE),
    "twinpool_pool_windows": (ctypes.POINTER(PoolArgs), _SIZE),
    "twinpool_streams_in": (ctypes.POINTER(StreamsInArgs), _SIZE),
    "twinpool_streams_out": (ctypes.POINTER(StreamsOutArgs), _SIZE),
    "twinpool_gating": (
        ctypes.POINTER(Gating),
        *(_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
    ),
    "twinpool_moe_experts": (
        ctypes.POINTER(ExpertsArgs),
        *(_POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER),
    ),
    "twinpool_grouped_linear": (_LINEAR, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER),
    "twinpool_logits_and_tokens": (
        *(_LINEAR, _POINTER, _SIZE, _SIZE, _POINTER),
        *(ctypes.POINTER(TokenChoice), _SIZE),
    ),
    "twinpool_decoder": (ctypes.POINTER(DecoderArgs), ctypes.POINTER(StepArgs), _INT, _INT),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built (no compiler). Raises ConfigError for a bad TWINPOOL_ISA."""
    path = next(iter(sorted(Path(__file__).parent.glob("_native*.so"))), None)
    if path is None:
        return None
    try:
        loaded = ctypes.CDLL(str(path))  # a CDLL, so that calls release the GIL
    except OSError:
        return None  # built for another machine
    try:
        loaded.twinpool_sources.argtypes, loaded.twinpool_sources.restype = (), ctypes.c_char_p
        if loaded.twinpool_sources().decode() != sources.digest(path.parent / "csrc"):
            raise AttributeError("their digests differ")
        for name, parameters in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = parameters, None
        decoder_bytes = loaded.twinpool_decoder_bytes
        decoder_bytes.argtypes, decoder_bytes.restype = (ctypes.POINTER(DecoderArgs), _SIZE), _SIZE
        loaded.twinpool_panel.argtypes, loaded.twinpool_panel.restype = (), ctypes.c_int
        loaded.twinpool_why_no_amx.argtypes, loaded.twinpool_why_no_amx.restype = (), ctypes.c_char_p
        loaded.twinpool_isa.argtypes, loaded.twinpool_isa.restype = (), ctypes.c_char_p
        loaded.twinpool_select_isa.argtypes, loaded.twinpool_select_isa.restype = (ctypes.c_char_p,), ctypes.c_int
    except AttributeError as exc:
        raise ConfigError(f"{path} was not built from {path.parent}/csrc ({exc}): install twinpool again") from exc
    say_why_no_amx(loaded)
    wanted = os.environ.get("TWINPOOL_ISA")
    if wanted and not loaded.twinpool_select_isa(wanted.encode()):
        raise ConfigError(
            f"TWINPOOL_ISA={wanted!r} is not available on this machine: unset it or choose one of {', '.join(ISAS)}",
            field="TWINPOOL_ISA",
        )
    return loaded


def say_why_no_amx(loaded: ctypes.CDLL) -> None:
    """Logs why the processor's tiles are left unused, where it has some."""
    if reason := loaded.twinpool_why_no_amx().decode():
        _log.warning("this processor's AMX is not used, prefill is slower than it could be: %s", reason)


def isa() -> str:
    """The instruction set in use; "" without the library."""
    loaded = library()
    return "" if loaded is None else loaded.twinpool_isa().decode()


def select_isa(name: str) -> bool:
    """Switches to another instruction set where this machine has it; for tests, and only while no kernel runs."""
    loaded = library()
    return loaded is not None and bool(loaded.twinpool_select_isa(name.encode()))
