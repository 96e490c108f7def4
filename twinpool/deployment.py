"""A whole deployment on this machine: one router, prefill and decode workers, each a process (`twinpool up`, `demo`).

1. `start` launches the router, waits until it serves, launches the workers with its address, waits until they serve and
   until the router counts them as ready. A child that dies meanwhile fails the start.
2. `watch` then looks after them: a child that dies is reported and started again after a growing wait, a log that has
   grown too large is cut, and a disk too full for logs is reported.
3. `stop` asks all of them to end, waits, and kills by pid what does not. It runs whatever happened before.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from twinpool import errors, log_folder, model_store
from twinpool.child import Child, wait_ready
from twinpool.client import Client

_FIRST_RESTART_WAIT_S = 0.5
_LONGEST_RESTART_WAIT_S = 30.0
_STEADY_AFTER_S = 60.0  # a child that lived this long begins again with the short wait
_LOG_CHECK_S = 1.0
_MOST_CORES = 8192  # what Linux can be built for

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """What to run. Options are given as the processes' own flags name them, without the dashes."""

    model: Path  # a Hugging Face directory
    model_name: str  # what clients call it
    prefill: int = 1  # workers
    decode: int = 1
    host: str = "127.0.0.1"  # of the router; workers listen on loopback
    port: int = 0  # of the router; 0 picks a free one
    metrics_port: int = 0
    log_bytes: int = 64 << 20  # a process' log may have before it is cut; 0: any number
    cores: tuple[int, ...] = ()  # to split over the workers; empty: all that this process may use
    router_options: Mapping[str, str] = field(default_factory=dict)
    worker_options: Mapping[str, str] = field(default_factory=dict)


class Deployment:
    """The processes of one spec. One thread starts, watches and stops them."""

    def __init__(self, spec: DeploymentSpec, report: Report) -> None:
        self.spec = spec
        self.log_folder = log_folder.new_folder(model_store.home() / "logs")
        self.address = ""  # where the router is reached, once it serves
        self.metrics_url = ""
        self._report = report
        self._router: Child | None = None
        self._workers: list[Child] = []
        self._env = {} if _is_loopback(spec.host) or os.environ.get("TWINPOOL_CLUSTER_KEY") else _new_cluster_key()
        self._deaths: dict[str, int] = {}  # child name -> deaths in a row
        self._left: set[str] = set()  # workers that somebody took away
        self._restart_at: dict[str, float] = {}  # child name -> when to start it again
        self._started_at: dict[str, float] = {}
        self._logs_checked_at = 0.0
        self._log_trouble = ""  # that has been reported

    @property
    def children(self) -> list[Child]:
        return ([self._router] if self._router else []) + self._workers

    def start(self, timeout_s: float) -> None:
        """Raises ConfigError, Internal or DeadlineExceeded that names the process and its log; then `stop` is due."""
        end = time.monotonic() + timeout_s
        self._report("starting the router")
        self._router = self._child("router", "router", self._router_flags(self.spec.port, self.spec.metrics_port))
        self._launch(self._router)
        wait_ready([self._router], timeout_s)
        self._note_router(self._router)
        self._report(f"starting {self.spec.prefill} prefill and {self.spec.decode} decode workers")
        self._workers = self._new_workers()
        for worker in self._workers:
            self._launch(worker)
        wait_ready(self._workers, end - time.monotonic())
        self._wait_joined(end)

    def watch(self) -> None:
        """Looks after the children for ever; an exception (Ctrl-C, SIGTERM) ends it."""
        while True:
            now = time.monotonic()
            for child in self.children:
                if child.name in self._restart_at:
                    if now >= self._restart_at[child.name]:
                        del self._restart_at[child.name]
                        self._launch(child)
                        self._report(f"{child.name} started again (pid {child.pid})")
                elif not child.running and child.name not in self._left:
                    if child.status == 0 and child is not self._router:  # drained, or told to stop by SIGTERM
                        self._left.add(child.name)
                        self._report(f"{child.name} has left, as it was told to; it is not started again")
                    else:
                        self._plan_restart(child, now)
            if now >= self._logs_checked_at + _LOG_CHECK_S:
                self._logs_checked_at = now
                self._check_logs()
            time.sleep(0.2)

    def stop(self, grace_s: float = 30.0) -> None:
        """Ends every child, by pid: SIGTERM, then SIGKILL for what is left after `grace_s` or at a second Ctrl-C."""
        end = time.monotonic() + grace_s
        if any(child.running for child in self.children):
            self._report("stopping")
        try:
            for child in self.children:
                child.terminate()
            for child in self.children:
                if not child.wait(end - time.monotonic()):
                    self._report(f"{child.name} (pid {child.pid}) did not stop within {grace_s:g} s: killed")
        finally:
            for child in self.children:
                child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _child(self, name: str, module: str, flags: Sequence[str]) -> Child:
        return Child(name, module, flags, self.log_folder, self._env)

    def _launch(self, child: Child) -> None:
        child.start()
        self._started_at[child.name] = time.monotonic()

    def _router_flags(self, port: int, metrics_port: int) -> list[str]:
        spec = self.spec
        return _flags(
            {
                "model": spec.model_name,
                "tokenizer": str(spec.model),
                "host": spec.host,
                "port": str(port),
                "metrics-port": str(metrics_port),
                **spec.router_options,
            }
        )

    def _new_workers(self) -> list[Child]:
        spec = self.spec
        names = [("prefill", i) for i in range(spec.prefill)] + [("decode", i) for i in range(spec.decode)]
        shares = split_cores(spec.cores or usable_cores(), len(names))
        workers = []
        for (pool, number), share in zip(names, shares, strict=True):
            options = {
                "model": str(spec.model),
                "model-name": spec.model_name,
                "routers": self.address,
                "worker-id": f"{pool}-{number}",
                "port": "0",
                "metrics-port": "0",
                "threads": str(max(1, len(share))),
                **({"kv-port": "0"} if pool == "decode" else {}),
                **({"cores": ",".join(map(str, share))} if share else {}),
                **spec.worker_options,
            }
            workers.append(self._child(f"{pool}-{number}", pool, _flags(options)))
        return workers

    def _note_router(self, router: Child) -> None:
        """Takes down where the router serves; a restart will use the same ports, as workers and clients know them."""
        ready = router.ready
        assert ready is not None
        port = ready.address.rpartition(":")[2]
        self.address = f"127.0.0.1:{port}" if self.spec.host in ("0.0.0.0", "::", "") else ready.address
        self.metrics_url = f"http://127.0.0.1:{ready.metrics_port}/metrics" if ready.metrics_port > 0 else ""
        router.options = self._router_flags(int(port), ready.metrics_port)

    def _wait_joined(self, end: float) -> None:
        with Client(self.address, retries=0, timeout_s=5) as client:
            while True:
                ready = {worker.worker_id for worker in client.pools().workers if worker.state == "ready"}
                missing = [worker.name for worker in self._workers if worker.name not in ready]
                if not missing:
                    return
                for child in self.children:
                    if not child.running:
                        raise child.death()
                if time.monotonic() > end:
                    raise errors.DeadlineExceeded(
                        f"the router does not count {', '.join(missing)} as ready; logs: {self.log_folder}"
                    )
                time.sleep(0.05)

    def _check_logs(self) -> None:
        """Cuts logs that are too large. Trouble is reported when it begins and when it has ended."""
        trouble = "there is no room for log lines, they are lost" if log_folder.is_full(self.log_folder) else ""
        for child in self.children if self.spec.log_bytes else ():
            try:
                log_folder.cut(child.log_file, self.spec.log_bytes)
            except OSError as error:
                trouble = trouble or f"{child.log_file.name} is too large and cannot be cut: {error.strerror}"
        if trouble != self._log_trouble:
            self._log_trouble = trouble
            self._report(f"{self.log_folder}: {trouble or 'logs are written again'}")

    def _plan_restart(self, child: Child, now: float) -> None:
        steady = now - self._started_at[child.name] > _STEADY_AFTER_S
        deaths = self._deaths[child.name] = 1 if steady else self._deaths.get(child.name, 0) + 1
        wait_s = min(_LONGEST_RESTART_WAIT_S, _FIRST_RESTART_WAIT_S * 2.0 ** (deaths - 1))
        self._restart_at[child.name] = now + wait_s
        self._report(f"{child.death().message}; starting it again in {wait_s:g} s")


def split_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint shares of `cores`, the first ones larger when it does not divide; empty shares (no pinning) when there
    are fewer cores than workers."""
    if not 0 < num_workers <= len(cores):
        return [()] * num_workers
    each, larger = divmod(len(cores), num_workers)
    ends = [(i + 1) * each + min(i + 1, larger) for i in range(num_workers)]
    return [tuple(cores[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def usable_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))  # macOS


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers of "0-3,8". Raises ConfigError when it is not that, or names a core that we may not use."""
    cores: list[int] = []
    try:
        for part in filter(None, (part.strip() for part in text.split(","))):
            first, _, last = part.partition("-")
            if not 0 <= int(first) <= int(last or first) < _MOST_CORES:
                raise ValueError(part)
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        raise errors.ConfigError(f'--cores {text!r} is not a list of cores such as "0-3,8"', field="cores") from None
    if not cores or not set(cores) <= set(usable_cores()):
        raise errors.ConfigError(f"--cores {text!r}: this process may use {usable_cores()}", field="cores")
    return tuple(dict.fromkeys(cores))


def _flags(options: Mapping[str, str]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _new_cluster_key() -> dict[str, str]:
    """A secret for this deployment's processes: the router can be reached from outside, and only they may join it."""
    return {"TWINPOOL_CLUSTER_KEY": secrets.token_hex(32)}
