"""python -m prefill and python -m decode: what an operator sees when something is wrong, and how they stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import decode.__main__
import prefill.__main__
from twinpool.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
MAINS: dict[str, Callable[[], None]] = {"prefill": prefill.__main__.main, "decode": decode.__main__.main}
POOLS = pytest.mark.parametrize("pool", sorted(MAINS))
QUIET = ["--port", "0", "--metrics-port", "-1", "--dtype", "fp32", "--block-size", "16", "--routers", "127.0.0.1:1"]


def options(pool: str, model: Path) -> list[str]:
    return [*QUIET, "--memory", "1MiB", "--model", str(model), *(["--kv-port", "0"] if pool == "decode" else [])]


def refused(monkeypatch: pytest.MonkeyPatch, pool: str, *argv: str) -> str:
    """The message of the ConfigError that ends the process."""
    monkeypatch.setattr(sys, "argv", [pool, *argv])
    with pytest.raises(ConfigError) as caught:
        MAINS[pool]()
    return caught.value.message


@POOLS
def test_missing_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: str) -> None:
    assert "--model" in refused(monkeypatch, pool, *QUIET)
    assert "no-such-model" in refused(monkeypatch, pool, *QUIET, "--model", str(tmp_path / "no-such-model"))


@POOLS
def test_too_little_memory_says_what_a_block_takes(monkeypatch: pytest.MonkeyPatch, model: Path, pool: str) -> None:
    message = refused(monkeypatch, pool, *options(pool, model), "--memory", "1KiB")
    block_bytes = 3 * (2 * 2 * 16 * 16 + 2 * 2 * 16 * 2)  # layers x (K and V codes + scales) of 2 heads of 16
    assert str(block_bytes) in message
    assert "--memory" in message


@POOLS
def test_cores_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, model: Path, pool: str) -> None:
    assert "4095" in refused(monkeypatch, pool, *options(pool, model), "--cores", "4095")
    assert "0-x" in refused(monkeypatch, pool, *options(pool, model), "--cores", "0-x")


@pytest.mark.parametrize(("pool", "flag"), [("prefill", "--port"), ("decode", "--port"), ("decode", "--kv-port")])
def test_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch, model: Path, pool: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused(monkeypatch, pool, *options(pool, model), flag, port)


@POOLS
def test_sigterm_ends_an_idle_worker_cleanly(tmp_path: Path, model: Path, pool: str) -> None:
    ready = tmp_path / "ready.json"
    argv = [sys.executable, "-m", pool, *options(pool, model), "--ready-file", str(ready), "--threads", "1"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TWINPOOL_")}
    process = subprocess.Popen(argv, cwd=REPO, stderr=subprocess.PIPE, text=True, env=env)
    try:
        end = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.02)
        assert json.loads(ready.read_text())["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, log
    events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
    assert [event for event in events if event != "no lease with router"][-2:] == ["ready", "stopping"]
