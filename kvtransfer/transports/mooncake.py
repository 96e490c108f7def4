"""KV rows by the Mooncake transfer engine: over RDMA, over Ascend's own links (its npu build), or over its TCP.

    mooncake          whichever device this host has: RDMA or Ascend; an error where it has none
    mooncake+rdma, mooncake+ascend, mooncake+tcp     exactly that

Mooncake quietly takes TCP when it finds no device, whatever it was asked for. So the device is looked for before, in
the library's own list of what it found after, and TCP is used only where its name says so. Peers find each other
without a metadata server (P2PHANDSHAKE). Rows are handed over one by one, WINDOW at a time, and looked after by the
link's own thread with its own deadline: the library's waiting calls burn a core, give up on writes that go on, and
cannot tell whether the source is still read. See one_sided.py for the rest.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtransfer.memory import SharedMemory
from kvtransfer.region import Region
from kvtransfer.transports import Caps, Link, one_sided, tcp
from kvtransfer.transports.one_sided import EngineSenderLink, Segment
from kvtransfer.transports.stream import StreamListener
from twinpool.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "mooncake"
FABRICS = ("rdma", "ascend", "tcp")
WINDOW = 32  # writes handed to the library at a time: the most that a frozen receiver leaves it with
PROGRESS_S = 10  # a TCP connection of the library on which nothing moves for this long is given up
_PACKAGES = {"ascend": "mooncake-transfer-engine-npu"}
_ENVIRONMENT = {  # read by the library when it is loaded; what the operator has set stays
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_S),
    "MC_TCP_STATUS_TIMEOUT_SEC": str(PROGRESS_S),
    "MC_TRANSFER_TIMEOUT": str(PROGRESS_S),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "3",
    "MC_LOG_LEVEL": "WARNING",
}
_RDMA_DEVICES = Path("/sys/class/infiniband")
_ASCEND_DEVICES = Path("/dev")  # davinci0, ...
_NO_BATCH = (0, -1, (1 << 64) - 1)  # what a submission that failed returns, by version
_DONE, _FAILED = 1, -1  # of transfer_check_status; anything else may still go on


class MooncakeTransport:
    caps = Caps(one_sided=True, fences_on_close=False, sees_dead_peer=True)

    def __init__(self, fabric: str | None = None) -> None:
        """fabric: one of FABRICS; None: what this host has, but never TCP. Raises ConfigError where it has not."""
        self._fabric = fabric or _find_fabric()
        _check_device(self._fabric)
        self._library = _load(self._fabric)
        if self._fabric == "rdma":
            _make_engine(self._library, self._fabric, "localhost")  # or a start without RDMA would be noticed late
        self._scheme = f"{NAME}+{self._fabric}"
        self._regions: Sequence[Region] = ()
        self._engine: MooncakeEngine | None = None
        self._lock = threading.Lock()

    def actual(self) -> str:
        return self._scheme

    def register(self, regions: Sequence[Region], memory: SharedMemory | None) -> None:
        self._regions = regions

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> StreamListener:
        name = (advertise or tcp.reachable_name(host)).rpartition(":")[0] or advertise or tcp.reachable_name(host)
        engine = self._engine_at(name)
        shared = one_sided.layout(engine, self._regions)
        return one_sided.listen(self._scheme, (host, port, advertise), lambda: self._engine, shared, on_link)

    def connect(self, endpoint: str, *, deadline: float) -> EngineSenderLink:
        return one_sided.connect(endpoint, self._scheme, self._engine_at, self._regions, deadline=deadline)

    def close(self) -> None:
        with self._lock:
            self._engine = None  # links that still drain keep it alive

    def _engine_at(self, host: str) -> MooncakeEngine:
        with self._lock:
            if self._engine is None:
                self._engine = MooncakeEngine(self._library, self._fabric, host, self._regions)
            return self._engine


class MooncakeEngine:
    """One transfer engine with the regions registered. The library is thread safe and releases the interpreter lock."""

    metadata = b""

    def __init__(self, library: Any, fabric: str, host: str, regions: Sequence[Region]) -> None:
        """Raises ConfigError when the library cannot start, or would use something else than `fabric`."""
        self._engine = _make_engine(library, fabric, host)
        for address, num_bytes in one_sided.registered_spans(regions):
            if self._engine.register_memory(address, num_bytes):
                raise ConfigError(
                    f"Mooncake cannot register {num_bytes} bytes of KV cache for {fabric}: see its log on stderr; "
                    "for RDMA the limit on locked memory must be above --memory (ulimit -l)"
                )
        bracketed = f"[{host}]" if ":" in host else host
        self.name = f"{bracketed}:{self._engine.get_rpc_port()}"
        log.info("Mooncake serves %s at %s; whoever reaches it can read and write the KV cache", fabric, self.name)

    def reach(self, name: str, metadata: bytes, peer: str) -> MooncakeWrites:
        # Has the library ask the other one what it is, which it does without a deadline: now, where one of ours holds.
        self._engine.get_first_buffer_address(name)
        return MooncakeWrites(self._engine, name, peer)

    def expect_writes(self, owner: object, push: int) -> None:
        """The library receives by itself."""

    def forget_writes(self, owner: object, push: int | None = None) -> None:
        """The library receives by itself."""

    def close(self) -> None:
        """Ends with the last link that holds it."""


class MooncakeWrites:
    """Writes to one other engine."""

    def __init__(self, engine: Any, session: str, peer: str) -> None:
        self.failure: str | None = None
        self._engine = engine
        self._session = session
        self._peer = peer
        self._waiting: deque[Segment] = deque()
        self._in_flight: list[int] = []

    def begin(self, segments: Sequence[Segment]) -> None:
        self._waiting.extend(segments)
        self._hand_over()

    def poll(self) -> int:
        going_on = []
        for batch in self._in_flight:
            status = self._engine.transfer_check_status(batch)
            if status == _FAILED:
                self._fail()
            elif status != _DONE:
                going_on.append(batch)
        self._in_flight = going_on
        self._hand_over()
        return len(self._in_flight) + len(self._waiting)

    def stop(self) -> None:
        self._waiting.clear()

    def close(self) -> None:
        """The library keeps what it knows of other engines."""

    def _hand_over(self) -> None:
        while self._waiting and len(self._in_flight) < WINDOW:
            each = self._waiting.popleft()
            batch = self._engine.transfer_submit_write(self._session, each.source, each.destination, each.num_bytes)
            if batch in _NO_BATCH:
                self._fail()
            else:
                self._in_flight.append(batch)

    def _fail(self) -> None:
        self._waiting.clear()
        self.failure = (
            f"Mooncake could not write to {self._session} ({self._peer}) and does not say why: the process there is "
            f"gone or frozen for {PROGRESS_S} s, its ports cannot be reached from here, or it does not have that "
            "memory registered; both processes' stderr has Mooncake's own log"
        )


def _find_fabric() -> str:
    if _ascend_devices() and _is_installed(_PACKAGES["ascend"]):
        return "ascend"  # such hosts may have network cards with RDMA besides
    if _rdma_devices():
        return "rdma"
    if _ascend_devices():
        return "ascend"
    raise ConfigError(
        "KV transport 'mooncake' found no RDMA device (/sys/class/infiniband is empty) and no Ascend NPU "
        "(/dev/davinci*), and Mooncake's TCP is used only where it is asked for: --kv-transport mooncake+tcp"
    )


def _check_device(fabric: str) -> None:
    if fabric == "rdma" and not _rdma_devices():
        raise ConfigError(
            "KV transport 'mooncake+rdma' found no RDMA device: /sys/class/infiniband is empty; load the driver of the "
            "network card, or ask for mooncake+tcp"
        )
    if fabric == "ascend" and not _ascend_devices():
        raise ConfigError("KV transport 'mooncake+ascend' found no Ascend NPU: there is no /dev/davinci*")


def _rdma_devices() -> list[str]:
    return sorted(path.name for path in _RDMA_DEVICES.glob("*"))


def _ascend_devices() -> list[str]:
    return sorted(path.name for path in _ASCEND_DEVICES.glob("davinci[0-9]*"))


def _load(fabric: str) -> Any:
    """The library's module. Raises ConfigError that says what is missing."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    package = _PACKAGES.get(fabric)
    if package is not None and not _is_installed(package):
        raise ConfigError(f"KV transport '{NAME}+{fabric}' needs {package} and CANN: pip install {package}")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as exc:
        raise ConfigError(
            f"KV transport '{NAME}' cannot load the Mooncake transfer engine ({exc}): pip install 'twinpool[mooncake]' "
            "and the system's libibverbs1 and libnuma1 (Debian, Ubuntu: apt-get install libibverbs1 libnuma1)"
        ) from exc


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _make_engine(library: Any, fabric: str, host: str) -> Any:
    """A started engine that really has a device for `fabric`."""
    engine = library.TransferEngine()
    status = engine.initialize(host, "P2PHANDSHAKE", fabric, "")
    if status:
        raise ConfigError(
            f"Mooncake does not start for {fabric} at {host} (it returned {status}): see its log on stderr"
        )
    if fabric == "rdma" and not _listed_devices(engine.get_local_topology()):
        raise ConfigError(
            "Mooncake was asked for RDMA but lists no device, so it would quietly use TCP: see its log on stderr; "
            "ask for mooncake+tcp if that is meant"
        )
    return engine


def _listed_devices(topology: str) -> list[str]:
    """Network devices in Mooncake's own description of what it found: {"cpu:0": [[preferred], [other]]}."""
    try:
        places = json.loads(topology).values()
        return sorted({device for preferred, others in places for device in (*preferred, *others)})
    except (ValueError, TypeError, AttributeError):
        return []
