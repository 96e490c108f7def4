"""Two hosts as network namespaces with an emulated link between them, and a deployment spread over both.

The scripts that make namespaces and link (netns.sh, linkemu.py) are not part of this project: TWINPOOL_RIG says where
they are. Nothing is touched in the namespace of the caller, and `close` removes all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes import Faults
from tests.flow.cluster import REPO, Cluster, Process, wait_until

PREFILL_HOST, DECODE_HOST = 1, 2
_LINK = "emu0"


class NotAllowed(Exception):
    """There is no rig here, or this process may not make namespaces and links."""


def rig() -> Path:
    folder = Path(os.environ.get("TWINPOOL_RIG", ""))
    if not os.environ.get("TWINPOOL_RIG") or not (folder / "netns.sh").exists():
        raise NotAllowed("TWINPOOL_RIG does not name a folder with netns.sh and linkemu.py")
    if shutil.which("ip") is None or not os.access("/dev/net/tun", os.W_OK):
        raise NotAllowed("emulated links need the program ip and a /dev/net/tun that may be written")
    return folder


class Lab:
    """Hosts 1 and 2; the link can be cut and restored. Raises NotAllowed where that cannot be made."""

    def __init__(self, *, rate_mbit: float, delay_ms: float, loss: float = 0) -> None:
        self._rig = rig()
        self._prefix = f"tp{os.getpid()}"
        self._link: subprocess.Popen[str] | None = None
        try:
            self._netns("up", "2")
            self._join(rate_mbit, delay_ms, loss)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        """Of the end of the emulated link."""
        return f"10.78.0.{host}"

    def on(self, host: int) -> list[str]:
        """What goes before a command that is to run there."""
        return ["ip", "netns", "exec", f"{self._prefix}-h{host}"]

    def cut_or_restore(self) -> None:
        assert self._link is not None
        self._link.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        if self._link is not None:
            self._link.terminate()
            self._link.wait(timeout=10)
        with contextlib.suppress(NotAllowed):
            self._netns("down")

    def _netns(self, *arguments: str) -> None:
        command = ["bash", str(self._rig / "netns.sh"), *arguments]
        done = subprocess.run(
            command, env={**os.environ, "PRE": self._prefix}, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise NotAllowed(f"netns.sh {arguments[0]}: {done.stderr.strip()}")

    def _join(self, rate_mbit: float, delay_ms: float, loss: float) -> None:
        ends = [f"{self._prefix}-h{host}:{_LINK}" for host in (1, 2)]
        options = ["--rate-mbit", str(rate_mbit), "--delay-ms", str(delay_ms), "--loss", str(loss)]
        command = [sys.executable, str(self._rig / "linkemu.py"), *ends, *options]
        self._link = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._link.stdout is not None
        if self._link.stdout.readline() != "ready\n":
            raise NotAllowed(f"linkemu.py: {self._link.communicate()[1].strip()}")
        for host in (1, 2):
            address = ["address", "add", f"{self.address(host)}/24", "dev", _LINK]
            subprocess.run(["ip", "-n", f"{self._prefix}-h{host}", *address], check=True, timeout=10)


class Probe:
    """A client that runs on one of the hosts (tests/net/probe.py)."""

    def __init__(self, lab: Lab, host: int, router: str) -> None:
        self._process = subprocess.Popen(
            [*lab.on(host), sys.executable, "-m", "tests.net.probe", router],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """What came of the command that was begun; its first tokens are a line of their own when it streams."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the probe died"
        return json.loads(line)

    def do(self, **command: Any) -> Any:
        self.begin(**command)
        return self.end()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


class Spread:
    """A prefill worker on host 1, a decode worker and the router on host 2."""

    def __init__(self, lab: Lab, folder: Path, model: Path, *, faults: Faults | None = None, **options: str) -> None:
        self.lab = lab
        self.cluster = Cluster(folder, model)
        self.probes: dict[int, Probe] = {}
        cluster, key = self.cluster, {"TWINPOOL_CLUSTER_KEY": "of the lab"}
        here, there = lab.address(DECODE_HOST), lab.address(PREFILL_HOST)
        try:
            cluster.prefixes = {"prefill-0": lab.on(PREFILL_HOST), "decode-0": lab.on(DECODE_HOST)}
            cluster.prefixes["router"] = lab.on(DECODE_HOST)
            self.router = cluster.router(env=key, host=here, probe_timeout="0" if faults else "10")
            self.prefill = cluster.worker("prefill", "prefill-0", env=key, host=there, faults=faults, **options)
            self.decode = cluster.worker("decode", "decode-0", env=key, host=here, **options)
            cluster.wait_ready()
            self.probes = {host: Probe(lab, host, self.router.address) for host in (PREFILL_HOST, DECODE_HOST)}
            wait_until(lambda: self.ask(pools=True) == ["ready", "ready"], "both workers joined", 60)
        except BaseException:
            self.close()
            raise

    def ask(self, **command: Any) -> Any:
        return self.probes[DECODE_HOST].do(**command)

    def held(self) -> float:
        """Rows in use on both workers."""
        return self._used("prefill", self.prefill, PREFILL_HOST) + self._used("decode", self.decode, DECODE_HOST)

    def _used(self, pool: str, worker: Process, host: int) -> float:
        at = f"{self.lab.address(host)}:{worker.metrics_port}"
        return float(self.probes[host].do(metric=f"twinpool_{pool}_rows_used", at=at))

    def close(self) -> None:
        for probe in self.probes.values():
            probe.close()
        self.cluster.close()


@contextmanager
def spread(
    folder: Path, model: Path, *, rate_mbit: float = 1000, delay_ms: float = 1, **options: Any
) -> Iterator[Spread]:
    """Both hosts and the deployment on them; all of it is gone afterwards."""
    lab = Lab(rate_mbit=rate_mbit, delay_ms=delay_ms)
    try:
        deployment = Spread(lab, folder, model, **options)
        try:
            yield deployment
        finally:
            deployment.close()
    finally:
        lab.close()
