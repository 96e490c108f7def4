"""Loading the native library, running it from several threads, and living without it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from engine import ops
from engine.ops import cpu, native, reference
from twinpool import sources
from twinpool.errors import ConfigError

ROOT = Path(__file__).parents[2]
FUNCTIONS = [
    *("set_num_threads", "pack_linear", "linear", "rms_norm", "add_rms_norm", "rope", "silu_mul"),
    *("store_kv", "prefill_attention", "decode_attention", "decoder"),
]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ops.BACKENDS)
def test_every_backend_has_every_function(name):
    backend = ops.load(name)
    assert name == backend.NAME
    assert all(callable(getattr(backend, function)) for function in FUNCTIONS)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="cpu, reference"):
        ops.load("abacus")


def test_without_the_library_the_cpu_backend_is_the_reference_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(native, "library", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert ops.load("cpu") is reference
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "NATIVE CPU KERNELS ARE MISSING" in caplog.text


def test_a_library_of_other_sources_is_refused(monkeypatch):
    """Its functions may have these names and other parameters."""
    monkeypatch.setattr(sources, "digest", lambda _: "0" * 32)
    with pytest.raises(ConfigError, match=r"_native.*so was not built from .*csrc .*: install twinpool again"):
        native.library.__wrapped__()


def test_a_digest_is_of_names_and_bytes_of_the_sources_alone(tmp_path):
    def digest(**files: str) -> str:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text)
        return sources.digest(folder)

    usual = digest(a_cpp="1", b_h="2")
    assert digest(a_cpp="1", b_h="2", notes_txt="3") == usual
    others = [digest(a_cpp="1", b_h="3"), digest(a_cpp="1", c_h="2"), digest(a_cpp="1"), digest(a_cpp="1", b_inl="2")]
    assert len({usual, *others}) == 1 + len(others)


def test_the_environment_chooses_the_instruction_set():
    for name in native.ISAS:
        result = python("from engine.ops import native; print(native.isa())", TWINPOOL_ISA=name)
        if native.select_isa(name):
            assert result.stdout.strip() == name
        else:
            assert "TWINPOOL_ISA" in result.stderr
    native.select_isa(python("from engine.ops import native; print(native.isa())").stdout.strip())


def test_an_unknown_instruction_set_is_refused():
    result = python("from engine.ops import native; native.library()", TWINPOOL_ISA="mmx")
    assert result.returncode == 1
    assert "TWINPOOL_ISA='mmx' is not available on this machine" in result.stderr


def test_calls_from_several_threads_at_once_each_get_their_own_result():
    cpu.set_num_threads(3)
    packed = cpu.pack_linear(torch.randn(300, 128), None)
    inputs = [torch.randn(17, 128) for _ in range(6)]
    expected = [cpu.linear(x, packed) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(200):
            if not torch.equal(cpu.linear(inputs[i], packed), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for resize in range(20):  # the pool may change size under way
        cpu.set_num_threads(1 + resize % 4)
    for thread in threads:
        thread.join(timeout=60)
    cpu.set_num_threads(1)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_the_package_builds_without_a_compiler(tmp_path):
    for folder in ("engine/ops/csrc", "kvtransfer/csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "twinpool").mkdir()
    for file in ("setup.py", "twinpool/sources.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env=os.environ | {"CC": "no-such-compiler", "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.glob("engine/ops/*.so"))
    assert 'building extension "engine.ops._native" failed' in result.stderr
