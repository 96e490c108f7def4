"""Builds the native kernels; everything else stands in pyproject.toml.

They are plain shared libraries behind C interfaces, without Python's or torch's headers. They are optional: where no
C++ compiler is found, the package installs all the same, the "cpu" backend runs on plain torch, and KV rows are copied
and hashed in separate passes.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup

digest = runpy.run_path("twinpool/sources.py")["digest"]  # not by an import, which would take what is not there yet

CSRC = "engine/ops/csrc"
ISAS = ["generic", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx", "amx_emulated"]
SOURCES = ["amx", "api", "compressed", "decoder", "feed_forward", "grouped_attention", "latent_attention", "moe"]
SOURCES += ["sampling", "threads", "topk", *(f"isa_{isa}" for isa in ISAS)]
HEADERS = [
    "amx.h",
    "compressed.h",
    "decoder.h",
    "dispatch.h",
    "isa.h",
    "kernels.h",
    "threads.h",
    "kernels.inl",
    "simd.inl",
    "panel.inl",
    "tiles.inl",
    "tiles_amx.inl",
    "tiles_emulated.inl",
    "quantize.inl",
    "linear.inl",
    "attention.inl",
    "compressed.inl",
    "kv_store.inl",
    "latent.inl",
    "moe.inl",
    "sampling.inl",
    "streams.inl",
    "elementwise.inl",
]

KV_CSRC = "kvtransfer/csrc"

setup(
    ext_modules=[
        Extension(
            "engine.ops._native",
            sources=[f"{CSRC}/{name}.cpp" for name in SOURCES],
            depends=[f"{CSRC}/{name}" for name in HEADERS],
            define_macros=[("TWINPOOL_SOURCES", f'"{digest(Path(CSRC))}"')],
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fno-math-errno",
                "-fno-trapping-math",
                # The same rounding in every copy of an expression: what makes results independent of the batch.
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-pthread",
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",  # gcc 12, in its own intrinsics
                "-Wno-uninitialized",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "kvtransfer._native",
            sources=[f"{KV_CSRC}/{name}.cpp" for name in ("api", "shared", "stream", "xxh3")],
            depends=[f"{KV_CSRC}/{name}.h" for name in ("look", "shared", "stream", "xxh3")],
            define_macros=[("TWINPOOL_SOURCES", f'"{digest(Path(KV_CSRC))}"')],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-Wno-psabi"],
            optional=True,
        ),
    ]
)
