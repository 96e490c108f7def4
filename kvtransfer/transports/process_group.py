"""A process group of two, made by torch.distributed without its global state: what carries the rows of one link.

    gloo          host memory, sent from and received into the rows themselves
    nccl, hccl    CUDA and Ascend devices: rows pass through one buffer there, because the cache is in host memory

Nothing of torch is imported before a group is asked for. A group is good until something times out or fails: the
libraries break the connection then, and nothing is received any more.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from twinpool.errors import ConfigError, PeerLost

BACKENDS = ("gloo", "nccl", "hccl")
_TAG = 0
_POLL_S = 50e-6  # between looks at a device, whose libraries do not wait with a deadline
_DEVICES = {"nccl": "cuda", "hccl": "npu"}


def check_backend(backend: str) -> None:
    """Raises ConfigError saying exactly what is missing here for that backend."""
    if backend not in BACKENDS:
        raise ConfigError(
            f"no collective backend is called {backend!r}: choose one of {', '.join(BACKENDS)}",
            field="kv_collective_backend",
        )
    missing = _missing(backend)
    if missing:
        raise ConfigError(
            f"--kv-collective-backend {backend} cannot be used: {missing}; choose another, or --kv-transport tcp",
            field="kv_collective_backend",
        )


def _missing(backend: str) -> str:
    if importlib.util.find_spec("torch") is None:
        return "the package torch is not installed"
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return "this build of torch has no torch.distributed"
    if backend == "gloo":
        return "" if dist.is_gloo_available() else "this build of torch has no gloo"
    if backend == "nccl":
        if not dist.is_nccl_available():
            return "this build of torch has no NCCL"
        return "" if torch.cuda.is_available() else "torch finds no CUDA device"
    if importlib.util.find_spec("torch_npu") is None:
        return "the package torch_npu is not installed"
    try:
        npu = importlib.import_module("torch_npu").npu
    except (ImportError, OSError) as exc:
        return f"torch_npu cannot be imported ({exc})"
    return "" if npu.is_available() else "torch_npu finds no Ascend device"


def serve_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """A store that listens on `host`, and its port. It ends when nothing refers to it."""
    dist = _distributed()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, 0), family=family, backlog=128)
    port = sock.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=sock.detach(),
    )
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> Any:
    dist = _distributed()
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


class GroupOfTwo:
    """One end, of rank 0 or 1. Owned by one thread at a time."""

    def __init__(self, backend: str, store: Any, name: str, rank: int, local_host: str, timeout_s: float) -> None:
        """Waits for the other end. Raises PeerLost when it does not come in time.

        name: of this pair, never used before on that store. local_host: the address that gloo listens on.
        """
        dist = _distributed()
        self._peer = 1 - rank
        self._device = _DEVICES.get(backend, "cpu")
        self._bounce: Any = None
        timeout = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(name, store)
        failure = ""
        try:
            if backend == "gloo":
                self._group: Any = _gloo(dist, prefixed, rank, local_host, timeout)
            elif backend == "nccl":
                self._group = _device_group(dist.ProcessGroupNCCL, prefixed, rank, timeout)
            else:
                hccl = importlib.import_module("torch_npu._C._distributed_c10d")
                self._group = _device_group(hccl.ProcessGroupHCCL, prefixed, rank, timeout)
        except (RuntimeError, ValueError) as exc:  # DistStoreError and the like are RuntimeErrors
            failure = _first_line(exc)
        if failure:
            raise PeerLost(f"no {backend} group came about: {failure}")

    def send(self, rows: Sequence[memoryview], timeout_s: float) -> None:
        """Returns when no row is read any more, whatever happened. Raises PeerLost."""
        self._move(rows, timeout_s, sending=True)

    def receive(self, rows: Sequence[memoryview], timeout_s: float) -> None:
        """Rows of the same sizes that the other end sends. When it returns, or raises PeerLost, nothing lands in them
        any more."""
        self._move(rows, timeout_s, sending=False)

    def close(self) -> None:
        """Breaks the connection; what the other end waits for fails."""
        group, self._group, self._bounce = self._group, None, None
        if group is not None and self._device != "cpu":
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _move(self, rows: Sequence[memoryview], timeout_s: float, *, sending: bool) -> None:
        if self._group is None:
            raise PeerLost("the process group is closed")
        deadline = time.monotonic() + timeout_s
        failure = ""
        try:
            if self._device == "cpu":
                failure = self._move_host(rows, deadline, sending)
            else:
                for row in rows:
                    self._move_staged(row, deadline, sending)
        except RuntimeError as exc:
            failure = _first_line(exc)
        if failure:  # outside of the handler: what refers to the error keeps the group, and with it descriptors, alive
            self.close()
            raise PeerLost(f"the process group broke: {failure}")

    def _start(self, tensor: Any, sending: bool) -> Any:
        return (self._group.send if sending else self._group.recv)([tensor], self._peer, _TAG)

    def _move_host(self, rows: Sequence[memoryview], deadline: float, sending: bool) -> str:
        """Why it failed; empty when it did not."""
        import torch

        works = [self._start(torch.frombuffer(_writable(row), dtype=torch.uint8), sending) for row in rows]
        failure = ""
        for work in works:  # all of them, after a failure too: then each ends at once, and none is pending afterwards
            try:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as exc:
                failure = failure or _first_line(exc)
        return failure

    def _move_staged(self, row: memoryview, deadline: float, sending: bool) -> None:
        import torch

        here = torch.frombuffer(_writable(row), dtype=torch.uint8)
        if self._bounce is None or self._bounce.numel() < len(here):
            self._bounce = torch.empty(len(here), dtype=torch.uint8, device=self._device)
        there = self._bounce[: len(here)]
        if sending:
            there.copy_(here)  # waits: the memory is not pinned
        work = self._start(there, sending)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("the other end did not take part in time")
            time.sleep(_POLL_S)
        work.wait()
        if not sending:
            here.copy_(there)  # only now does anything reach the row


def _gloo(dist: Any, store: Any, rank: int, local_host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_host)]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _device_group(kind: Any, store: Any, rank: int, timeout: timedelta) -> Any:
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, 2, options)


def _distributed() -> Any:
    return importlib.import_module("torch.distributed")


def _writable(row: memoryview) -> memoryview:
    """torch takes no other memory, though it only reads what it sends."""
    return memoryview(bytearray(row)) if row.readonly else row


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
