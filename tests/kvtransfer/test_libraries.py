"""Mooncake and NIXL at start: a device that is not there is an error that says what to do, never another way."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvtransfer import KvSender, transports
from kvtransfer.transports import mooncake, nixl, shm
from kvtransfer.transports.mooncake import WINDOW, MooncakeEngine, MooncakeWrites
from kvtransfer.transports.nixl import NixlEngine, NixlWrites
from kvtransfer.transports.one_sided import Segment
from tests.kvtransfer.conftest import TRANSPORTS
from tests.kvtransfer.peers import FINGERPRINT, Pair, eventually, make_regions
from twinpool.errors import ConfigError, PeerLost

needs_mooncake = pytest.mark.skipif("mooncake+tcp" not in TRANSPORTS, reason="Mooncake cannot be loaded here")
needs_nixl = pytest.mark.skipif("nixl+tcp" not in TRANSPORTS, reason="NIXL cannot be loaded here")

# What the module calls, as the package mooncake-transfer-engine-non-cuda 0.3.13.post1 describes it; the npu package is
# built from the same source.
SIGNATURES = {
    "initialize": "(self: mooncake.engine.TransferEngine, arg0: str, arg1: str, arg2: str, arg3: str) -> int",
    "register_memory": (
        "(self: mooncake.engine.TransferEngine, buffer_addr: int, capacity: int, location: str = '*') -> int"
    ),
    "get_rpc_port": "(self: mooncake.engine.TransferEngine) -> int",
    "get_local_topology": "(self: mooncake.engine.TransferEngine, device_name: str = None) -> str",
    "get_first_buffer_address": "(self: mooncake.engine.TransferEngine, arg0: str) -> int",
    "transfer_submit_write": (
        "(self: mooncake.engine.TransferEngine, target_hostname: str, buffer: int, peer_buffer_address: int, "
        "length: int, transport_hint: str = '') -> int"
    ),
    "transfer_check_status": "(self: mooncake.engine.TransferEngine, arg0: int) -> int",
}


class FakeTransferEngine:
    """Has exactly those calls; copies at once."""

    topology = '{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "npu:0": [[], []]}'
    protocols: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.submitted: list[tuple[str, int, int, int]] = []
        self.answer: int | None = None  # of the next submissions
        self.status = 1

    def initialize(self, arg0: str, arg1: str, arg2: str, arg3: str) -> int:
        assert arg1 == "P2PHANDSHAKE"
        FakeTransferEngine.protocols += (arg2,)
        return 0

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 15000

    def get_local_topology(self, device_name: str | None = None) -> str:
        return self.topology

    def get_first_buffer_address(self, arg0: str) -> int:
        return 1

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        if self.answer is not None:
            return self.answer
        ctypes.memmove(peer_buffer_address, buffer, length)
        self.submitted.append((target_hostname, buffer, peer_buffer_address, length))
        self.statuses[len(self.submitted)] = self.status
        return len(self.submitted)

    def transfer_check_status(self, arg0: int) -> int:
        return self.statuses[arg0]


class FakeLibrary:
    TransferEngine = FakeTransferEngine


def segments(number: int) -> list[Segment]:
    memory = (ctypes.c_char * 16)()
    address = ctypes.addressof(memory)
    kept.append(memory)
    return [Segment(address, address + 8, 8)] * number


kept: list[Any] = []


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with the devices that a test makes in there, under infiniband and dev."""
    for name in ("infiniband", "dev"):
        (tmp_path / name).mkdir()
    for module in (mooncake, nixl):
        monkeypatch.setattr(module, "_RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(mooncake, "_ASCEND_DEVICES", tmp_path / "dev")
    return tmp_path


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("name", ["mooncake", "mooncake+rdma", "nixl", "nixl+rdma"])
def test_without_a_device_nothing_else_is_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="found no RDMA device"):
        KvSender(make_regions(1), fingerprint=FINGERPRINT, transport=name)


def test_ascend_needs_its_device_and_its_own_package(devices: Path) -> None:
    with pytest.raises(ConfigError, match="no Ascend NPU"):
        transports.create("mooncake+ascend")
    (devices / "dev/davinci0").touch()
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine-npu"):
        transports.create("mooncake+ascend")


@needs_mooncake
def test_mooncake_that_would_quietly_use_tcp_for_rdma_is_refused(devices: Path) -> None:  # by the real library
    (devices / "infiniband/mlx5_0").touch()
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this host has an RDMA device")
    with pytest.raises(ConfigError, match="lists no device, so it would quietly use TCP"):
        transports.create("mooncake+rdma")


@needs_nixl
def test_nixl_that_finds_no_way_but_those_it_may_not_use_is_refused(devices: Path) -> None:  # by the real library
    (devices / "infiniband/mlx5_0").touch()
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this host has an RDMA device")
    with pytest.raises(ConfigError, match=r"does not work on this host.*UCX_TLS=ib"):
        transports.create("nixl+rdma")


def test_a_probe_that_dies_or_hangs_is_a_config_error(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "infiniband/bnxt_re0").touch()
    monkeypatch.setattr(nixl, "_load", lambda: None)

    def die(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], -11, "", "")

    def hang(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("probe", 60)

    for run, message in ((die, "status -11"), (hang, "timed out")):
        monkeypatch.setattr(nixl.subprocess, "run", run)
        with pytest.raises(ConfigError, match=message):
            transports.create("nixl")


@pytest.mark.parametrize(
    ("name", "extra"), [("mooncake+tcp", r"twinpool\[mooncake\].*libibverbs1"), ("nixl+tcp", r"twinpool\[nixl\]")]
)
def test_a_library_that_is_not_there_says_how_to_install_it(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(module: str) -> object:
        raise ImportError(f"libibverbs.so.1: cannot open shared object file ({module})")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=rf"libibverbs\.so\.1.*{extra}"):
        transports.create(name)


def test_what_is_there_is_what_a_name_without_a_fabric_means(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_load", lambda fabric: FakeLibrary)
    FakeTransferEngine.protocols = ()
    (devices / "infiniband/mlx5_0").touch()
    assert list(transports.choose("mooncake")) == ["mooncake+rdma"]
    (devices / "dev/davinci0").touch()
    assert list(transports.choose("mooncake")) == ["mooncake+rdma"]  # its package is not there
    monkeypatch.setattr(mooncake, "_is_installed", lambda package: package == "mooncake-transfer-engine-npu")
    assert list(transports.choose("mooncake")) == ["mooncake+ascend"]
    assert FakeTransferEngine.protocols == ("rdma", "rdma")  # tried at start


@pytest.mark.parametrize(
    ("topology", "devices"),
    [
        ('{"cpu:0": [[], []]}', []),
        ('{"cpu:0": [["rxe0"], []]}', ["rxe0"]),
        ('{"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cpu:1": [["mlx5_0"], []]}', ["mlx5_0", "mlx5_1"]),
        ("", []),
        ("[1]", []),
    ],
)
def test_the_devices_that_mooncake_lists(topology: str, devices: list[str]) -> None:
    assert mooncake._listed_devices(topology) == devices


@needs_mooncake
def test_the_calls_are_those_of_the_library() -> None:
    engine = importlib.import_module("mooncake.engine").TransferEngine
    for name, signature in SIGNATURES.items():
        assert getattr(engine, name).__doc__.strip() == name + signature
        parameters = list(inspect.signature(getattr(FakeTransferEngine, name)).parameters)
        assert parameters == [part.partition(":")[0].strip(" (") for part in signature.partition(") ->")[0].split(",")]


@needs_nixl
def test_the_calls_of_nixl_are_there_and_its_thread_is_off() -> None:
    library = importlib.import_module("nixl_cu12._api")
    parameters = inspect.signature(library.nixl_agent_config).parameters
    assert {"enable_prog_thread", "enable_listen_thread", "backends", "sync_mode"} <= set(parameters)
    made: list[Any] = []

    class Library:
        nixl_agent_config = library.nixl_agent_config
        nixl_thread_sync_t = library.nixl_thread_sync_t

        @staticmethod
        def nixl_agent(name: str, config: Any) -> Any:
            made.append(config)
            return library.nixl_agent(name, config)

    engines = [NixlEngine(Library, "tcp", make_regions(1)) for _ in range(2)]
    assert [config.enable_pthread for config in made] == [False, False]
    assert engines[0].name != engines[1].name  # or a restarted worker would be refused
    for engine in engines:
        engine.close()


def test_a_transfer_over_the_calls_of_the_npu_build(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "dev/davinci0").touch()
    monkeypatch.setattr(mooncake, "_load", lambda fabric: FakeLibrary)
    FakeTransferEngine.protocols = ()
    pair = Pair("mooncake+ascend")
    try:
        pair.assert_serves()
    finally:
        pair.close()
    assert set(FakeTransferEngine.protocols) == {"ascend"}


def test_memory_that_cannot_be_registered_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTransferEngine, "register_memory", lambda *args: -1)
    with pytest.raises(ConfigError, match="cannot register 192000 bytes"):
        MooncakeEngine(FakeLibrary, "tcp", "127.0.0.1", make_regions(1))


def test_mooncake_has_few_writes_at_a_time_and_a_timeout_of_its_own_is_no_end() -> None:
    engine = FakeTransferEngine()
    engine.status = -2  # its clock ran out, the write may go on
    writes = MooncakeWrites(engine, "there:1", "worker")
    assert WINDOW <= 1024  # of some 2,000 at a time the library breaks its way to that peer for good
    writes.begin(segments(3 * WINDOW))
    assert len(engine.submitted) == WINDOW
    assert writes.poll() == 3 * WINDOW
    assert writes.failure is None
    engine.statuses = dict.fromkeys(engine.statuses, 1)
    engine.status = 1
    eventually(lambda: writes.poll() == 0)
    assert len(engine.submitted) == 3 * WINDOW


@pytest.mark.parametrize("answer", [0, -1, (1 << 64) - 1])
def test_mooncakes_minus_one_says_who_and_where_to_look(answer: int) -> None:
    engine = FakeTransferEngine()
    engine.answer = answer
    writes = MooncakeWrites(engine, "there:1", "worker")
    writes.begin(segments(2))
    assert writes.failure is not None
    for part in ("there:1", "worker", "does not say why", "stderr"):
        assert part in writes.failure
    assert writes.poll() == 0


def test_a_write_that_failed_waits_for_those_beside_it() -> None:
    engine = FakeTransferEngine()
    engine.status = 0
    writes = MooncakeWrites(engine, "there:1", "worker")
    writes.begin(segments(2))
    engine.statuses[1] = -1
    assert writes.poll() == 1  # its source is still read
    assert writes.failure is not None


class FakeAgent:
    """The calls of an engine that a write makes."""

    def __init__(self, states: list[str | Exception]) -> None:
        self.states = states
        self.released = 0

    def write(self, name: str, segments: list[Segment]) -> tuple[object, str]:
        return "handle", self.state("handle")

    def state(self, handle: object) -> str:
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    def release(self, handle: object) -> None:
        self.released += 1


@pytest.mark.parametrize("last", ["DONE", "ERR", RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")])
def test_a_handle_of_nixl_is_released_when_its_write_is_over_and_not_before(last: str | Exception) -> None:
    agent = FakeAgent(["PROC", "PROC", last])
    writes = NixlWrites(agent, "name", "worker")  # type: ignore[arg-type]
    writes.begin(segments(1))
    assert writes.poll() == 1
    writes.stop()
    assert agent.released == 0  # to release is not to cancel: the source would still be read
    assert writes.poll() == 0
    assert agent.released == 1
    assert (writes.failure is None) == (last == "DONE")


@needs_nixl
def test_shared_memory_of_another_host_is_refused() -> None:
    engine = NixlEngine(importlib.import_module("nixl_cu12._api"), "shm", make_regions(1))
    with pytest.raises(PeerLost, match="quietly use TCP"):
        engine.reach("twinpool/00000000-0000-0000-0000-000000000000/00", engine.metadata, "elsewhere")
    with pytest.raises(PeerLost, match="does not take the description"):
        engine.reach(f"twinpool/{shm.this_host()}/00", b"noise", "here")
    engine.close()


@needs_nixl
def test_rows_travel_over_nixls_shared_memory() -> None:
    pair = Pair("nixl+shm")
    try:
        pair.assert_serves()
    finally:
        pair.close()


@needs_nixl
def test_nobody_is_looked_after_while_nothing_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "IDLE_POLL_S", 60.0)
    engine = NixlEngine(importlib.import_module("nixl_cu12._api"), "tcp", make_regions(1))
    polls: list[float] = []
    monkeypatch.setattr(engine._agent, "get_new_notifs", lambda: polls.append(time.monotonic()))
    engine.start()
    eventually(lambda: polls)
    engine.expect_writes(engine, 1)
    eventually(lambda: len(polls) > 5)
    engine.forget_writes(engine, 1)
    time.sleep(0.05)
    number = len(polls)
    time.sleep(0.1)
    assert len(polls) == number
    engine.close()
