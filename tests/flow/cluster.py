"""A real deployment in a test: router, prefill and decode workers as processes on 127.0.0.1, free ports, small models.

Every test ends with `assert_baseline`: all rows free, nothing running, waiting, queued or reserved anywhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import Faults
from twinpool.client import Client

START_TIMEOUT_S = 60.0
REPO = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 15.0) -> Any:
    """The first truthy value of `condition`, polled; fails the test with `what` when the time is up."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


@dataclass
class Process:
    """One child: its command, where it listens, what it logged."""

    name: str
    argv: list[str]
    popen: subprocess.Popen[bytes]
    ready_file: Path
    log_file: Path
    address: str = ""
    metrics_port: int = 0

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def log_records(self, event: str) -> list[dict[str, Any]]:
        records = []
        for line in self.log.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("event") == event:
                records.append(record)
        return records

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples called `name` whose labels include `labels`; 0 when there is none."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(timeout=10)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, then wait; the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"{self.name} ignored SIGTERM for {timeout_s:g} s:\n{self.log[-2000:]}") from None
        return self.popen.returncode


@dataclass
class Cluster:
    folder: Path
    model: Path
    processes: dict[str, Process] = field(default_factory=dict)
    prefixes: dict[str, list[str]] = field(default_factory=dict)  # of a process' command: what runs it elsewhere

    def _start(self, name: str, module: str, options: dict[str, str], env: dict[str, str]) -> Process:
        ready, log = self.folder / f"{name}.ready", self.folder / f"{name}.log"
        ready.unlink(missing_ok=True)
        argv = [
            *self.prefixes.get(name, []),
            sys.executable,
            "-m",
            *module.split(),
            "--ready-file",
            str(ready),
            "--metrics-port",
            "0",
        ]
        for key, value in {"port": "0", **options}.items():
            argv += [f"--{key.replace('_', '-')}", value]
        with log.open("ab") as out:
            popen = subprocess.Popen(
                argv, cwd=REPO, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **env}
            )
        process = self.processes[name] = Process(name, argv, popen, ready, log)
        return process

    def wait_ready(self, *names: str) -> None:
        for process in [self.processes[name] for name in names] or list(self.processes.values()):
            wait_until(
                lambda p=process: p.ready_file.exists() or p.popen.poll() is not None,
                f"{process.name} ready",
                START_TIMEOUT_S,
            )
            if not process.ready_file.exists():
                raise AssertionError(f"{process.name} exited with {process.popen.returncode}:\n{process.log[-3000:]}")
            state = json.loads(process.ready_file.read_text())
            process.address, process.metrics_port = state["address"], int(state["metrics_port"])

    def router(self, name: str = "router", *, env: dict[str, str] | None = None, **options: str) -> Process:
        defaults = {"tokenizer": str(self.model), "model": "tiny"}
        process = self._start(name, "router", {**defaults, **options}, env or {})
        self.wait_ready(name)
        return process

    def worker(
        self,
        pool: str,
        name: str,
        *,
        env: dict[str, str] | None = None,
        faults: Faults | None = None,
        hosts: Path | None = None,
        **options: str,
    ) -> Process:
        """Starts a worker without waiting for it. Joins every router that runs now, unless told otherwise.

        faults: of a prefill worker's links. hosts: names that it knows (tests/named_hosts.py).
        """
        routers = ",".join(p.address for n, p in self.processes.items() if n.startswith("router"))
        defaults = {
            "model": str(self.model),
            "model_name": "tiny",
            "routers": routers,
            "worker_id": name,
            "dtype": "fp32",
            "memory": "8MiB",
            "threads": "1",
            "block_size": "16",
        }
        if pool == "decode":
            defaults |= {"kv_port": "0", "swap": "4MiB"}
        options = {**defaults, **options}
        if hosts is not None:
            return self._start(name, f"tests.named_hosts {pool}", options, {**(env or {}), "HOSTS": str(hosts)})
        if faults is None:
            return self._start(name, pool, options, env or {})
        assert pool == "prefill"
        return self._start(
            name, "tests.faulty_prefill", options, {**(env or {}), "KV_FAULTS": json.dumps(asdict(faults))}
        )

    def client(self, router: str = "router", **options: Any) -> Client:
        return Client(self.processes[router].address, **options)

    def wait_workers(self, count: int, router: str = "router", states: tuple[str, ...] = ("ready",)) -> None:
        with self.client(router) as client:
            wait_until(
                lambda: sum(w.state in states for w in client.pools().workers) == count,
                f"{count} workers {' or '.join(states)} at {router}",
                START_TIMEOUT_S,
            )

    def assert_baseline(self, router: str = "router", timeout_s: float = 10.0) -> None:
        """Waits until nothing is held anywhere; else fails and says what is."""

        def held() -> str:
            with self.client(router) as client:
                pools = client.pools()
            found = [f"router queued={pools.queued} running={pools.running}"] if pools.queued or pools.running else []
            for worker in pools.workers:
                process = self.processes.get(worker.worker_id)
                if process is None or process.popen.poll() is not None:
                    continue
                pool = worker.pool
                used = process.metric(f"twinpool_{pool}_rows_used") + process.metric(f"twinpool_{pool}_states_used")
                running = process.metric(f"twinpool_{pool}_running")
                waiting = process.metric(f"twinpool_{pool}_waiting")
                reserved = process.metric(f"twinpool_{pool}_reservations") if pool == "decode" else 0
                if used or running or waiting or reserved:
                    found.append(f"{worker.worker_id} rows={used:g} {running=:g} {waiting=:g} {reserved=:g}")
            return "; ".join(found)

        last = ["?"]

        def clean() -> bool:
            last[0] = held()
            return not last[0]

        try:
            wait_until(clean, "baseline", timeout_s)
        except AssertionError:
            raise AssertionError(f"still held after {timeout_s:g} s: {last[0]}") from None

    def close(self) -> None:
        for process in self.processes.values():
            if process.popen.poll() is None:
                process.popen.kill()
        for process in self.processes.values():
            process.popen.wait(timeout=10)


def open_cluster(
    folder: Path, model: Path, prefill: int, decode: int, *, router: dict[str, str] | None = None, **worker_options: str
) -> Iterator[Cluster]:
    """One router (with these options), `prefill` and `decode` workers, all ready; closed at the end."""
    cluster = Cluster(folder, model)
    try:
        cluster.router(**(router or {}))
        for i in range(prefill):
            cluster.worker("prefill", f"prefill-{i}", **worker_options)
        for i in range(decode):
            cluster.worker("decode", f"decode-{i}", **worker_options)
        cluster.wait_ready()
        alone = not (prefill and decode) and (router or {}).get("when_pool_empty") == "fail"
        cluster.wait_workers(prefill + decode, states=("joining", "ready") if alone else ("ready",))
        yield cluster
    finally:
        cluster.close()
