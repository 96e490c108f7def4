"""Which transport a link takes when none is asked for, and what happens where the one asked for is not there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer import KvSender, SharedMemory, cache_memory, transports
from kvtransfer.transports import mooncake, nixl, shm
from tests.kvtransfer.peers import FINGERPRINT, KEY, Pair, eventually, make_regions
from twinpool.errors import ConfigError, PeerLost


@pytest.fixture
def pair(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pair]:
    caplog.set_level(logging.INFO, "kvtransfer")
    monkeypatch.setattr(mooncake, "_RDMA_DEVICES", tmp_path)  # whatever this host has
    monkeypatch.setattr(mooncake, "_ASCEND_DEVICES", tmp_path)
    monkeypatch.setattr(nixl, "_RDMA_DEVICES", tmp_path)
    pair = Pair("auto")
    yield pair
    pair.close()


def schemes(pair: Pair) -> list[str]:
    return [endpoint.partition("://")[0] for endpoint in pair.receiver.endpoints]


def one_sided(pair: Pair) -> list[bool]:
    return [link.one_sided for link in pair.receiver._links]


def test_shared_memory_comes_first_and_the_log_says_so(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert transports.PREFERENCE == ("shm", "mooncake", "nixl", "tcp")
    assert schemes(pair) == ["shm", "tcp"]
    at_start = " ".join(record.getMessage() for record in caplog.get_records("setup"))
    assert "'mooncake' found no RDMA device" in at_start
    assert "'nixl' found no RDMA device" in at_start
    pair.assert_serves()
    assert one_sided(pair) == [True]
    assert f"KV rows for {pair.receiver.endpoints[1]} go over shm" in caplog.text


def test_another_host_is_reached_by_tcp_and_the_log_says_why(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "this_host", lambda: "00000000-0000-0000-0000-000000000000")
    pair.assert_serves()
    assert one_sided(pair) == [False]
    assert "go over tcp; shm://" in caplog.text
    assert "is on another host" in caplog.text


def test_another_network_namespace_is_reached_by_tcp_and_the_log_says_why(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "_address", lambda name: f"\0nobody-{name}")
    pair.assert_serves()
    assert one_sided(pair) == [False]
    assert "needs the same network namespace" in caplog.text


def test_a_cache_that_cannot_be_shared_is_offered_over_tcp_only(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.receiver.close()
    pair.destination = make_regions(2)
    pair.receiver = pair.make_receiver(pair.destination, memory=None, metrics=pair.receiver_counters)
    assert schemes(pair) == ["tcp"]
    assert "'shm' is not offered" in caplog.text
    pair.assert_serves()


def test_a_sender_that_is_told_a_transport_takes_no_other(pair: Pair) -> None:
    for transport, expected in (("tcp", [False]), ("shm", [True])):
        sender = KvSender(pair.source, fingerprint=FINGERPRINT, cluster_key=KEY, transport=transport)
        reservation, ends = pair.reserve([1, 2])
        assert pair.send(reservation, [3, 4], sender=sender).error is None
        assert ends.wait().rows == 6
        assert one_sided(pair) == expected
        sender.close()
        reservation.release()
        eventually(lambda: not pair.receiver._links)


def test_a_receiver_without_the_transport_that_a_sender_must_use_is_an_error(pair: Pair) -> None:
    receiver = pair.make_receiver(make_regions(2), transport="tcp", memory=None)
    pair.receiver.close()
    pair.receiver = receiver
    sender = KvSender(pair.source, fingerprint=FINGERPRINT, cluster_key=KEY, transport="shm")
    reservation, _ = pair.reserve([1])
    with pytest.raises(PeerLost, match=r"is reached by tcp://.*; this sender has shm"):
        pair.open(reservation, sender=sender)
    sender.close()


def test_a_transport_that_is_not_there_is_a_config_error_at_start(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm.ShmTransport, "actual", lambda transport: "none")
    with pytest.raises(ConfigError, match="'shm' is configured but 'none'"):
        KvSender(pair.source, fingerprint=FINGERPRINT, transport="shm")
    assert list(transports.choose("auto")) == ["tcp"]


def test_a_system_without_shareable_memory(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError("memfd_create is forbidden")

    caplog.set_level(logging.INFO, "kvtransfer")
    assert isinstance(cache_memory("auto"), SharedMemory)
    monkeypatch.setattr("os.memfd_create", refuse)
    assert cache_memory("auto") is None
    assert "forbidden" in caplog.text
    assert cache_memory("tcp") is None
    with pytest.raises(ConfigError, match="forbidden"):
        cache_memory("shm")
