"""What is special about rows that a process group carries; the rest: every other test here, as [collective]."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kvtransfer import KvSender, transports
from kvtransfer.transports import Options, collective, process_group
from tests.kvtransfer.peers import FINGERPRINT, KEY, PATIENCE_S, Pair, eventually, issued, rows_of
from tests.kvtransfer.test_processes import process
from twinpool.errors import ConfigError, PeerLost


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair("collective")
    yield pair
    pair.close()


def threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_fifty_links_of_collective_leave_no_thread_and_no_descriptor(pair: Pair) -> None:
    def one_link(number: int) -> None:
        sender = KvSender(pair.source, fingerprint=FINGERPRINT, cluster_key=KEY, transport="collective")
        reservation, ends = pair.reserve([1, 2], attempt=number)
        assert pair.send(reservation, [3, 4], sender=sender).error is None
        assert ends.wait().rows == 6
        sender.close()
        reservation.release()
        eventually(lambda: not pair.receiver._links)

    one_link(1)
    flat = threads_and_descriptors()
    for number in range(2, 52):
        one_link(number)
    eventually(lambda: threads_and_descriptors() <= flat, "return to as many threads and descriptors")


def test_a_sender_of_collective_frozen_in_the_middle_of_a_frame_is_fenced(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver has posted rows when its sender stops; once `release` is over they are safe, thaw or not."""
    monkeypatch.setattr(collective, "FRAME_TIMEOUT_S", 1.0)
    reservation, _ = pair.reserve(range(8))
    with process("collective_writer_process", reservation.target.hex()) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "the header is out\n"
        eventually(lambda: reservation._landing)
        sender.send_signal(signal.SIGSTOP)
        assert reservation.release() is True
        for region in pair.destination:
            for row in range(8):
                region.row(row)[:] = bytes([0xA5]) * region.row_bytes
        sender.send_signal(signal.SIGCONT)
        assert sender.stdout.readline() == "PeerLost\n"  # it has sent, or tried to
        time.sleep(0.1)
    assert {row for layer in rows_of(pair.destination, range(8)) for row in layer} == {bytes([0xA5]) * 1000}
    eventually(lambda: not pair.receiver._links)
    pair.assert_serves()


def test_a_receiver_of_collective_that_is_gone_ends_the_push_and_the_next_makes_another_link(pair: Pair) -> None:
    reservation, ends = pair.reserve([1])
    push = pair.open(reservation)
    push.put(0, [0], [7])
    eventually(lambda: pair.receiver_counters.rows == 1)
    next(iter(pair.receiver._links)).cut()
    assert push.closed.wait(PATIENCE_S)
    assert isinstance(push.error, PeerLost)
    assert isinstance(ends.wait(), PeerLost)
    pair.assert_serves()


def test_a_partner_that_never_joins_the_group_is_given_up_by_the_deadline() -> None:
    store, port = process_group.serve_store("127.0.0.1", 1.0)
    assert port > 0
    with pytest.raises(PeerLost, match="no gloo group came about"):
        process_group.GroupOfTwo("gloo", store, "alone", 0, "127.0.0.1", 0.2)


def test_auto_never_takes_collective() -> None:
    assert "collective" not in transports.PREFERENCE
    assert "collective" not in transports.choose("auto")


def test_rows_of_collective_leave_tls_only_where_that_is_accepted() -> None:
    certificates = issued().load()
    with pytest.raises(ConfigError, match="--kv-collective-plaintext"):
        transports.create("collective", Options(certificates=certificates))
    accepted = Options(certificates=certificates, collective_plaintext=True)
    pair = Pair("collective", options=accepted)
    try:
        pair.assert_serves()
        link = next(iter(pair.receiver._links))
        assert type(link._control).__name__ == "TlsLink"  # type: ignore[attr-defined]
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("backend", "missing"),
    [
        ("smoke", "choose one of gloo, nccl, hccl"),
        ("hccl", "the package torch_npu is not installed"),
        ("nccl", "NCCL" if not dist.is_nccl_available() else "no CUDA device"),
    ],
)
def test_a_backend_that_cannot_run_says_what_is_missing(
    backend: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=missing):
        transports.create("collective", Options(collective_backend=backend))


def test_collective_without_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="torch is not installed"):
        transports.create("collective")


def test_torch_is_not_imported_before_a_collective_transport_is_made() -> None:
    program = (
        "import sys, kvtransfer; from kvtransfer import transports; transports.create('tcp');"
        "import kvtransfer.transports.collective; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "False\n", done.stderr


class DeviceGroup:
    """Stands for ProcessGroupNCCL and ProcessGroupHCCL: their constructor, and sends that complete when looked at."""

    sent: list[bytes]

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert isinstance(store, dist.PrefixStore)
        assert (rank, size) == (1, 2)
        assert options._timeout.total_seconds() == 5
        self.sent, self.aborted, self.stuck = [], False, False

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        self.sent.append(bytes(tensors[0].numpy()))
        return SimpleNamespace(is_completed=lambda: not self.stuck, wait=lambda: True)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        tensors[0].fill_(7)
        return SimpleNamespace(is_completed=lambda: not self.stuck, wait=lambda: True)

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture(params=["nccl", "hccl"])
def staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> process_group.GroupOfTwo:
    """A group whose device is the host."""
    monkeypatch.setattr(process_group, "_DEVICES", {"nccl": "meta-free", "hccl": "meta-free"})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", DeviceGroup, raising=False)
    npu = SimpleNamespace(ProcessGroupHCCL=DeviceGroup)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_npu._C", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_npu._C._distributed_c10d", npu)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    return process_group.GroupOfTwo(request.param, dist.HashStore(), "pair", 1, "127.0.0.1", 5)


def test_rows_pass_through_one_buffer_on_the_device(staged: process_group.GroupOfTwo) -> None:
    rows = [memoryview(bytearray([number]) * 100) for number in range(3)]
    staged.send(rows, PATIENCE_S)
    buffer = staged._bounce
    assert staged._group.sent == [bytes(row) for row in rows]
    staged.receive(rows[:2], PATIENCE_S)
    assert [bytes(row[:1]) for row in rows] == [b"\7", b"\7", b"\2"]
    assert staged._bounce is buffer


def test_a_device_group_that_does_not_end_in_time_is_aborted_and_writes_no_row(
    staged: process_group.GroupOfTwo,
) -> None:
    group = staged._group
    group.stuck = True
    row = memoryview(bytearray(10))
    with pytest.raises(PeerLost, match="in time"):
        staged.receive([row], 0.01)
    assert group.aborted
    assert bytes(row) == bytes(10)
    with pytest.raises(PeerLost, match="closed"):
        staged.send([row], 0.01)


def test_the_signatures_of_torch_are_those_that_are_called() -> None:
    for kind in filter(None, (dist.ProcessGroupGloo, getattr(dist, "ProcessGroupNCCL", None))):
        assert "store: torch._C._distributed_c10d.Store, rank" in str(kind.__init__.__doc__)
        assert "Options" in str(kind.__init__.__doc__)
    for name, peer in (("send", "dstRank"), ("recv", "srcRank")):
        documented = str(getattr(dist.ProcessGroupGloo, name).__doc__)
        assert "tensors: collections.abc.Sequence[torch.Tensor], " + peer in documented
        assert "tag:" in documented
    assert "master_listen_fd" in str(dist.TCPStore.__init__.__doc__)
