"""A real etcd server (Debian's etcd-server) for tests, on free ports and a folder of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

PROGRAM = shutil.which("etcd")
needed = pytest.mark.skipif(PROGRAM is None, reason="no etcd here (Debian, Ubuntu: apt-get install etcd-server)")


class Etcd:
    """Serves at `url` from `start` to `kill`; the data survive, unless `forget` is called between the two."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client, self._peer = _free_port(), _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"etcd://127.0.0.1:{self._client}"

    def start(self) -> None:
        client, peer = f"http://127.0.0.1:{self._client}", f"http://127.0.0.1:{self._peer}"
        assert PROGRAM is not None
        command = [PROGRAM, "--data-dir", str(self._folder / "etcd"), "--initial-cluster", f"default={peer}"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 30
        while True:
            assert self._process.poll() is None, (self._folder / "etcd.log").read_text()[-2000:]
            try:
                socket.create_connection(("127.0.0.1", self._client), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < end, "etcd does not serve"
                time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(10)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        shutil.rmtree(self._folder / "etcd")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
