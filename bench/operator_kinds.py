"""Kinds of what runs on a device, by the names that its profiler gives operators and kernels.

Names are compared without underscores and case, so that one list serves the names of torch_npu's functions
(npu_fused_infer_attention_score), those of CANN's operator types (FusedInferAttentionScore), HCCL's (hcom_allReduce_)
and CUDA's kernels. A product of matrices may be a router's, and a softmax or a top-k a gating's: for such names the
kind is that of the span of ours (bench/operators.py) that launched the operator, where it is known.
"""

from __future__ import annotations

# Looked for in this order: a name may hold words of several lines.
CERTAIN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("moe", ("moe", "groupedmatmul")),
    ("moe", ("hcom", "hccl", "nccl", "alltoall", "allgather", "reducescatter", "allreduce")),  # communication
    ("linear", ("mlaprolog", "mlapreprocess")),  # all matrices in front of attention in one, with the write of latents
    ("attention", ("attention", "attn", "flashfwd", "fmha", "fusedinfer", "ringmla", "lightningindexer")),
    ("kv_access", ("andcache", "kvcache", "rotary", "rope", "compressepilog")),
    ("sampling", ("topktopp", "argmax", "multinomial")),
)
UNCERTAIN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("linear", ("matmul", "gemm", "gemv", "cutlass", "cublas", "nvjet", "linear")),
    ("attention", ("softmax",)),
    ("kv_access", ("scatternd", "indexput")),
    ("sampling", ("topk", "sort")),
)


def kind_of(name: str, launched_in: str | None = None) -> str:
    """launched_in: the kind of the span that launched it, None: not known."""
    plain = name.replace("_", "").lower()
    for kind, words in CERTAIN:
        if any(word in plain for word in words):
            return kind
    if launched_in is not None:
        return launched_in
    for kind, words in UNCERTAIN:
        if any(word in plain for word in words):
            return kind
    return "other"
