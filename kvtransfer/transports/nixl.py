"""KV rows by NIXL (UCX): over RDMA, over shared memory of one host, or over UCX' TCP.

    nixl, nixl+rdma   RDMA only; an error where UCX has no device for it
    nixl+shm          processes of one host
    nixl+tcp          UCX' TCP

UCX quietly takes whatever it was allowed, so it is allowed the one thing that was asked for. (nixl+shm has to allow
TCP too, which UCX connects by; so other hosts are refused.) Cache memory may be a GPU's: UCX' CUDA transports are
allowed with RDMA. NIXL's own progress thread burns a core and is off: the sender's link thread looks after its writes,
and the receiver has one thread that drives UCX while a push may write, and sleeps otherwise. NIXL knows no deadlines
and cannot cancel, so deadlines are ours and sources stay pinned until it says that a write is over. See one_sided.py.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtransfer.memory import SharedMemory
from kvtransfer.region import Region
from kvtransfer.transports import Caps, Link, one_sided, shm
from kvtransfer.transports.one_sided import EngineSenderLink, Segment
from kvtransfer.transports.stream import StreamListener
from twinpool.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

NAME = "nixl"
UCX_TLS = {  # what UCX may use for each fabric
    "rdma": "ib,cuda_copy,cuda_ipc,gdr_copy,self",
    "shm": "sysv,posix,cma,self,tcp",
    "tcp": "tcp,self",
}
ACTIVE_POLL_S = 0.0005  # while a push may write into this process
IDLE_POLL_S = 0.1  # otherwise: for connections that come and go
PROBE_TIMEOUT_S = 60.0
_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_RDMA_DEVICES = Path("/sys/class/infiniband")


class NixlTransport:
    caps = Caps(one_sided=True, fences_on_close=False, sees_dead_peer=True)

    def __init__(self, fabric: str = "rdma") -> None:
        """fabric: a key of UCX_TLS. Raises ConfigError where it is not to be had."""
        self._fabric = fabric
        if fabric == "rdma" and not any(_RDMA_DEVICES.glob("*")):
            raise ConfigError(
                "KV transport 'nixl' found no RDMA device: /sys/class/infiniband is empty; UCX' other transports are "
                "used only where they are asked for: --kv-transport nixl+shm or nixl+tcp"
            )
        self._library = _load()
        if fabric == "rdma":
            _probe(fabric)
        self._scheme = f"{NAME}+{fabric}"
        self._regions: Sequence[Region] = ()
        self._engine: NixlEngine | None = None
        self._lock = threading.Lock()

    def actual(self) -> str:
        return self._scheme

    def register(self, regions: Sequence[Region], memory: SharedMemory | None) -> None:
        with self._lock:
            self._regions = regions
            self._engine = NixlEngine(self._library, self._fabric, regions)

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> StreamListener:
        engine = self._registered()
        shared = one_sided.layout(engine, self._regions)
        engine.start()
        return one_sided.listen(self._scheme, (host, port, advertise), lambda: self._engine, shared, on_link)

    def connect(self, endpoint: str, *, deadline: float) -> EngineSenderLink:
        return one_sided.connect(endpoint, self._scheme, lambda _: self._registered(), self._regions, deadline=deadline)

    def close(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()  # links that still drain keep the library alive

    def _registered(self) -> NixlEngine:
        with self._lock:
            if self._engine is None:
                raise PeerLost("NIXL has no memory registered in this process, or was closed")
            return self._engine


class NixlEngine:
    """One agent with the regions registered, and the thread that drives it on the receiving side."""

    def __init__(self, library: Any, fabric: str, regions: Sequence[Region]) -> None:
        """Raises ConfigError when NIXL cannot start with what `fabric` may use."""
        self._is_local = fabric == "shm"
        self.name = f"twinpool/{shm.this_host()}/{secrets.token_hex(8)}"  # never used again, or NIXL refuses it
        self._agent = _make_agent(library, fabric, self.name)
        self._lock = threading.Lock()  # around every call of the library
        spans = [(address, size, 0, "") for address, size in one_sided.registered_spans(regions)]
        try:
            self._agent.register_memory(spans, "DRAM", ["UCX"])
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as exc:  # the library's own classes
            raise ConfigError(
                f"NIXL cannot register the KV cache for {fabric}: {exc}; "
                "for RDMA the limit on locked memory must be above --memory (ulimit -l)"
            ) from exc
        self._num_users: dict[str, int] = {}  # links, by the agent they reach
        self._expected: set[tuple[object, int]] = set()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Receiving: has UCX driven."""
        self._thread = threading.Thread(target=self._drive, name="kv-nixl", daemon=True)
        self._thread.start()

    def reach(self, name: str, metadata: bytes, peer: str) -> NixlWrites:
        if self._is_local and name.split("/")[1:2] != [shm.this_host()]:
            raise PeerLost(f"{peer} is on another host, where nixl+shm would quietly use TCP")
        with self._lock:
            try:
                found = self._agent.add_remote_agent(metadata)
            except Exception as exc:  # the library's own classes
                raise PeerLost(f"NIXL does not take the description of {peer}: {exc}") from exc
            if found not in (name, name.encode()):
                raise PeerLost(f"{peer} calls itself {name!r}, its NIXL agent {found!r}")
            self._num_users[name] = self._num_users.get(name, 0) + 1
        return NixlWrites(self, name, peer)

    def leave(self, name: str) -> None:
        """One link fewer reaches the agent `name`."""
        with self._lock:
            self._num_users[name] -= 1
            if self._num_users[name]:
                return
            del self._num_users[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception as exc:  # it is gone: nothing is left to be forgotten
                log.debug("NIXL does not forget %s: %s", name, exc)

    def write(self, name: str, segments: Sequence[Segment]) -> tuple[Any, str]:
        """A handle and its state: DONE, PROC or ERR. What the library raises, it raises."""
        here = [(each.source, each.num_bytes, 0) for each in segments]
        there = [(each.destination, each.num_bytes, 0) for each in segments]
        with self._lock:
            agent = self._agent
            sources, destinations = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")
            handle = agent.initialize_xfer("WRITE", sources, destinations, name, b"", ["UCX"])
            return handle, agent.transfer(handle)

    def state(self, handle: Any) -> str:
        with self._lock:
            state: str = self._agent.check_xfer_state(handle)
            return state

    def release(self, handle: Any) -> None:
        with self._lock:
            self._agent.release_xfer_handle(handle)

    def expect_writes(self, owner: object, push: int) -> None:
        with self._changed:
            self._expected.add((owner, push))
            self._changed.notify()

    def forget_writes(self, owner: object, push: int | None = None) -> None:
        with self._changed:
            self._expected = {each for each in self._expected if each[0] is not owner or push not in (None, each[1])}

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _drive(self) -> None:
        while True:
            with self._lock:
                try:
                    self._agent.get_new_notifs()  # there are none: this is what makes UCX take in what has arrived
                except Exception as exc:  # a peer that died; its links find out by themselves
                    log.debug("NIXL: %s", exc)
            with self._changed:
                if not self._is_closed:
                    self._changed.wait(ACTIVE_POLL_S if self._expected else IDLE_POLL_S)
                if self._is_closed:
                    return


class NixlWrites:
    """Writes to one other agent."""

    def __init__(self, engine: NixlEngine, name: str, peer: str) -> None:
        self.failure: str | None = None
        self._engine = engine
        self._name = name
        self._peer = peer
        self._handle: Any = None

    def begin(self, segments: Sequence[Segment]) -> None:
        try:
            self._handle, state = self._engine.write(self._name, segments)
        except Exception as exc:  # the library's own classes
            self._fail(exc)
        else:
            self._take(state)

    def poll(self) -> int:
        if self._handle is None:
            return 0
        try:
            self._take(self._engine.state(self._handle))
        except Exception as exc:  # the library's own classes: this write is over
            self._fail(exc)
            self._release()
        return int(self._handle is not None)

    def stop(self) -> None:
        """What was begun was handed over at once."""

    def close(self) -> None:
        self._engine.leave(self._name)

    def _take(self, state: str) -> None:
        if state == "PROC":
            return
        if state != "DONE":
            self._fail(state)
        self._release()

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        try:
            self._engine.release(handle)
        except Exception as exc:  # the library keeps it, and tries again when the agent ends
            log.debug("NIXL keeps a handle: %s", exc)

    def _fail(self, why: object) -> None:
        self.failure = f"NIXL could not write to {self._peer}: {why}"


def _load() -> Any:
    """The library's module. Raises ConfigError that says what is missing."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    reasons = []
    for module in _MODULES:
        try:
            library = importlib.import_module(module)
        except ImportError as exc:
            reasons.append(str(exc))
        else:
            _end_without_destructors()
            return library
    raise ConfigError(
        f"KV transport '{NAME}' cannot load NIXL ({'; '.join(reasons)}): pip install 'twinpool[nixl]' "
        "(with CUDA 13: pip install nixl-cu13)"
    )


@functools.cache
def _end_without_destructors() -> None:
    """Lets this process end, with its own status, before the destructors of its libraries.

    Where the host has RDMA drivers (Debian: ibverbs-providers) their libnl and the one in NIXL's wheel take each
    other's entries apart there: SIGSEGV after all is done (nixl-cu12 1.5.1), which whoever started the process takes
    for a crash.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc; it hands over the status
        libc.on_exit(libc._exit, None)


def _make_agent(library: Any, fabric: str, name: str) -> Any:
    """An agent whose UCX has what `fabric` may use and nothing else."""
    config = library.nixl_agent_config(
        enable_prog_thread=False,
        enable_listen_thread=False,
        backends=["UCX"],
        sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = UCX_TLS[fabric]  # read by UCX while the agent is made
    try:
        agent = library.nixl_agent(name, config)
    except Exception as exc:  # the library's own classes
        raise ConfigError(
            f"NIXL does not start for {fabric} with UCX_TLS={UCX_TLS[fabric]} ({exc}): UCX finds no such device, or "
            "cannot open it; its log is on stderr, and `ucx_info -d` lists what it finds"
        ) from exc
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before
    if "UCX" not in agent.get_plugin_list() or not agent.get_backend_mem_types("UCX"):
        raise ConfigError("NIXL has no UCX plugin here: reinstall it, pip install 'twinpool[nixl]'")
    return agent


def _probe(fabric: str) -> None:
    """Makes an agent in another process first: with some network cards UCX dies instead of saying that it cannot."""
    command = [sys.executable, "-c", f"from kvtransfer.transports import nixl; nixl.probe({fabric!r})"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"NIXL could not be tried for {fabric}: {exc}") from exc
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(
            f"KV transport '{NAME}+{fabric}' does not work on this host: an agent ended with status {done.returncode} "
            f"({last}); NIXL's wheel drives Mellanox cards only, others go by mooncake"
        )


def probe(fabric: str) -> None:
    """Makes an agent and drops it."""
    _make_agent(_load(), fabric, "probe")
