"""What both pools tell Prometheus about transfers: figures that follow from what was sent, by transport and by peer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from decode.metrics import DecodeMetrics
from kvtransfer import KvReceiver, KvSender, metrics
from kvtransfer.metrics import NoLinkMetrics, error_name, host_of
from kvtransfer.wire import Malformed, SpeaksTls
from prefill.metrics import PrefillMetrics
from service import peers
from tests.fakes import Faults, injected
from tests.kvtransfer.peers import FINGERPRINT, KEY, PATIENCE_S, Ends, FakeReceiver, Pair, eventually, make_regions
from tests.kvtransfer.test_lease import Peer
from twinpool.errors import ChecksumMismatch, Incompatible, Internal, PeerLost, ReservationGone, TransferTimeout

ROW_BYTES = 1000
LAYERS = 3
HOSTS = {"tcp": "127.0.0.1", "shm": "localhost"}  # what peers are called that do not say who they are


class Observed:
    """A pair of workers' ends, "prefill-a" and "decode-a", with the metrics of the two processes."""

    def __init__(self, transport: str, faults: Faults | None = None) -> None:
        self.pair = Pair(transport, row_bytes=ROW_BYTES, num_layers=LAYERS)
        self.pair.receiver.close()
        self.pair.sender.close()
        self.prefill, self.decode = CollectorRegistry(), CollectorRegistry()
        self.sending = PrefillMetrics(self.prefill).transfers
        self.receiving = DecodeMetrics(self.decode).transfers
        self.receiver = self.pair.receiver = self.make_receiver()
        self.receiver.introduce_as("decode-a")
        with injected(faults):
            self.pair.sender = self.make_sender("prefill-a", self.sending)

    def make_receiver(self, **options: Any) -> KvReceiver:
        return self.pair.make_receiver(self.pair.destination, metrics=self.receiving, **options)

    def make_sender(self, name: str, reports: metrics.TransferMetrics | None = None, **options: Any) -> KvSender:
        """The caller closes it."""
        ours = {"fingerprint": FINGERPRINT, "cluster_key": KEY, "transport": self.pair.transport} | options
        sender = KvSender(self.pair.source, metrics=reports, **ours)
        sender.introduce_as(name)
        return sender

    def sent(self, name: str, **labels: str) -> float:
        return total(self.prefill, f"twinpool_prefill_{name}", labels)

    def received(self, name: str, **labels: str) -> float:
        return total(self.decode, f"twinpool_decode_{name}", labels)

    def send(self, rows: list[int], **options: Any) -> None:
        """A whole transfer that goes well."""
        reservation, ends = self.pair.reserve(rows, **options)
        assert self.pair.send(reservation, rows).error is None
        ends.wait()
        reservation.release()

    def close(self) -> None:
        self.pair.close()


def total(registry: CollectorRegistry, name: str, labels: dict[str, str]) -> float:
    """Sum of the samples with these labels; -1 when there are none."""
    found = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else -1


def labels_of(registry: CollectorRegistry, label: str) -> set[str]:
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {sample.labels[label] for sample in samples if label in sample.labels}


@pytest.fixture
def observed(transport: str) -> Iterator[Observed]:
    made = Observed(transport)
    yield made
    made.close()


@pytest.fixture
def processes() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for process in made:
        process.close()


def test_bytes_rows_and_times_of_transfers_by_transport_and_peer(observed: Observed, transport: str) -> None:  # S2
    observed.send([0, 1, 2])
    observed.send([5], request_id="r2")
    there = {"transport": transport, "peer": "decode-a"}
    here = {"transport": transport, "peer": "prefill-a"}
    for figure, of_four_rows in (("rows", 4 * LAYERS), ("bytes", 4 * LAYERS * ROW_BYTES)):
        assert observed.sent(f"transfer_{figure}_total", **there) == of_four_rows
        assert observed.received(f"transfer_{figure}_total", **here) == of_four_rows
    for ask, labels in ((observed.sent, there), (observed.received, here)):
        assert ask("transfer_seconds_count", **labels) == 2
        assert ask("transfer_seconds_sum", **labels) > 0
        assert ask("transfers_open", **labels) == 0
        assert ask("links_open", **labels) == 1
        for never in ("transfer_retries_total", "lost_leases_total"):
            assert ask(never, **labels) == 0
        for never in ("transfer_failures_total", "transfer_refusals_total"):
            assert ask(never) == -1
    assert observed.sent("transfer_gigabytes_per_second_count", **there) == 2
    assert observed.sent("transfer_gigabytes_per_second_sum", **there) > 0
    assert observed.sent("transfer_queued_rows", **there) == observed.sent("transfer_queued_bytes", **there) == 0
    assert labels_of(observed.prefill, "peer") == {"decode-a"}
    assert labels_of(observed.decode, "peer") == {"prefill-a"}
    observed.pair.sender.close()
    assert observed.sent("links_open") == 0
    eventually(lambda: observed.received("links_open") == 0, "end of the link")


def test_a_second_attempt_is_a_retry(observed: Observed) -> None:
    observed.send([0], attempt=1)
    observed.send([0], attempt=2)
    observed.send([0], attempt=3)
    assert observed.sent("transfer_retries_total", peer="decode-a") == 2
    assert observed.received("transfer_retries_total", peer="prefill-a") == 2


def test_a_transfer_under_way_is_open_until_it_ends_by_somebodys_wish(observed: Observed, transport: str) -> None:
    for number, ended in enumerate(("Aborted", "Released"), start=1):
        reservation, _ = observed.pair.reserve([1], request_id=ended)
        push = observed.pair.open(reservation)
        push.put(0, [0], [1])
        eventually(lambda number=number: observed.received("transfer_rows_total") == number, "arrival of the row")
        assert observed.sent("transfers_open", transport=transport, peer="decode-a") == 1
        assert observed.received("transfers_open", transport=transport, peer="prefill-a") == 1
        if ended == "Aborted":
            push.abort("the client has gone")
            eventually(lambda: observed.received("transfer_failures_total", error="Aborted") == 1, "the abort")
            assert observed.sent("transfer_failures_total", error="Aborted") == 1
        reservation.release()
        push.put(1, [0], [1])  # where nothing tells a sender of a release, its next frame is refused
        eventually(lambda: observed.sent("transfers_open") == observed.received("transfers_open") == 0, "the end")
    assert observed.received("transfer_failures_total", error="Released", peer="prefill-a") == 1
    assert observed.sent("transfer_failures_total", error="ReservationGone", peer="decode-a") == 1


def test_rows_and_bytes_that_a_slow_receiver_keeps_waiting() -> None:
    regions = make_regions(1, row_bytes=300_000)  # one layer is one frame, and more than fits on the way
    registry = CollectorRegistry()
    slow = FakeReceiver(make_regions(2, row_bytes=300_000))
    sender = KvSender(
        regions, fingerprint=FINGERPRINT, cluster_key=KEY, transport="tcp", metrics=PrefillMetrics(registry).transfers
    )
    try:
        push = sender.open(slow.target(64), request_id="r1", attempt=1, timeout_s=60)
        for layer in range(LAYERS):
            push.put(layer, range(64), range(64))
        link = slow.admit()
        labels = {"transport": "tcp", "peer": "127.0.0.1"}
        eventually(lambda: total(registry, "twinpool_prefill_transfer_queued_rows", labels) == 2 * 64, "a full link")
        assert total(registry, "twinpool_prefill_transfer_queued_bytes", labels) == 2 * 64 * 300_000
        assert total(registry, "twinpool_prefill_transfer_bytes_total", labels) == 0  # the frame is not out
        link.close()
        assert push.closed.wait(PATIENCE_S)
        eventually(lambda: total(registry, "twinpool_prefill_transfer_queued_rows", labels) == 0, "an empty queue")
        assert total(registry, "twinpool_prefill_transfer_queued_bytes", labels) == 0
        assert total(registry, "twinpool_prefill_transfer_failures_total", labels | {"error": "PeerLost"}) == 1
    finally:
        sender.close()
        slow.close()


def test_refusals_name_peer_and_reason_on_both_ends(observed: Observed, transport: str) -> None:
    used, ends = observed.pair.reserve([1])
    assert observed.pair.send(used, [1]).error is None
    ends.wait()
    assert isinstance(observed.pair.send(used, [1]).error, ReservationGone)
    gone = {"transport": transport, "error": "ReservationGone"}
    assert observed.received("transfer_refusals_total", peer="prefill-a", **gone) >= 1
    assert observed.sent("transfer_refusals_total", peer="decode-a", **gone) == 1
    assert observed.sent("transfer_failures_total", peer="decode-a", **gone) == 1

    unlike = observed.make_sender("prefill-b", observed.sending, fingerprint="another model")
    reservation, _ = observed.pair.reserve([2], request_id="r2")
    assert isinstance(observed.pair.send(reservation, [2], sender=unlike).error, Incompatible)
    reservation.release()
    unlike.close()
    # The receiver has not let it in, so it knows no more than where it came from; the sender never had a link.
    labels = {"transport": transport, "peer": HOSTS[transport], "error": "Incompatible"}
    eventually(lambda: observed.received("transfer_refusals_total", **labels) == 1, "the refusal")
    assert observed.sent("transfer_refusals_total", transport="none", peer="decode-a", error="Incompatible") == 1
    assert observed.received("links_open", peer=HOSTS[transport]) == 0


def test_damaged_rows_are_a_refusal_and_a_failure(transport: str) -> None:
    observed = Observed(transport, Faults(corrupt_every=2))
    reservation, ends = observed.pair.reserve([1, 2])
    assert isinstance(observed.pair.send(reservation, [1, 2]).error, ChecksumMismatch)
    ends.wait()
    reservation.release()
    damaged = {"transport": transport, "error": "ChecksumMismatch"}
    for figure in ("transfer_refusals_total", "transfer_failures_total"):
        assert observed.sent(figure, peer="decode-a", **damaged) == 1
        assert observed.received(figure, peer="prefill-a", **damaged) == 1
    assert observed.received("transfer_bytes_total") == 0  # of rows that were verified
    observed.close()


def test_a_link_made_after_a_broken_one_is_a_reconnect(transport: str) -> None:
    observed = Observed(transport, Faults(break_after_rows=4))
    observed.send([1])  # three rows
    there = {"transport": transport, "peer": "decode-a"}
    assert observed.sent("link_reconnects_total", **there) == 0
    reservation, ends = observed.pair.reserve([1], request_id="r2")
    assert isinstance(observed.pair.send(reservation, [1]).error, PeerLost)
    ends.wait()
    reservation.release()
    assert observed.sent("transfer_failures_total", error="PeerLost", **there) == 1
    observed.send([1], request_id="r3")
    assert observed.sent("link_reconnects_total", **there) == 1
    assert observed.sent("links_open", **there) == 1
    observed.close()


def test_only_a_link_that_comes_about_is_a_reconnect(observed: Observed, transport: str) -> None:
    reservation, _ = observed.pair.reserve([1])
    observed.receiver.close()
    for attempt in range(1, 4):
        assert isinstance(observed.pair.send(reservation, [1]).error, PeerLost), attempt
    failed = {"transport": "none", "peer": "decode-a"}
    assert observed.sent("transfer_failures_total", error="PeerLost", **failed) == 3
    assert observed.sent("link_reconnects_total") == observed.sent("links_open") == 0
    observed.receiver = observed.pair.receiver = observed.make_receiver()  # it comes back
    observed.receiver.introduce_as("decode-a")
    observed.send([1], request_id="r2")
    assert observed.sent("link_reconnects_total", transport=transport, peer="decode-a") == 1
    assert observed.sent("link_reconnects_total", **failed) == 0


def test_the_quarantine_of_a_frozen_senders_rows_shows_until_it_lets_go(
    observed: Observed, processes: list[Peer], transport: str
) -> None:
    frozen = Peer("send", transport)
    processes.append(frozen)
    ends = Ends()
    reservation = observed.receiver.reserve(
        request_id="r1", attempt=1, rows={"kv": [1, 2, 3, 4]}, timeout_s=60, on_commit=ends, on_failed=ends
    )
    frozen.push(reservation, "rows")
    eventually(lambda: observed.received("transfer_rows_total") == 2, "arrival of the rows")
    frozen.freeze()
    assert isinstance(ends.wait(), PeerLost)
    held = {"transport": transport, "peer": HOSTS[transport]}
    assert observed.received("lost_leases_total", **held) == 1
    assert observed.received("transfer_failures_total", error="PeerLost", **held) == 1
    assert observed.received("transfers_open", **held) == 0
    is_free = reservation.release()
    assert is_free == (transport == "tcp")
    assert observed.received("quarantined_reservations", **held) == (0 if is_free else 1)
    assert observed.received("quarantined_rows", **held) == (0 if is_free else 4)
    eventually(lambda: observed.received("links_open", **held) == 0, "the end of the link")
    assert observed.received("quarantined_rows", **held) == (0 if is_free else 4)
    frozen.thaw()
    eventually(lambda: observed.received("quarantined_rows", **held) == 0, "the end of the quarantine")
    assert observed.received("quarantined_reservations", **held) == 0


def test_a_frozen_receiver_is_a_lost_lease_of_the_sender(
    observed: Observed, processes: list[Peer], transport: str
) -> None:
    frozen = Peer("receive", transport)
    processes.append(frozen)
    push = observed.pair.sender.open(frozen.target(), request_id="r1", attempt=1, timeout_s=60)
    push.put(0, range(64), range(64))
    held = {"transport": transport, "peer": HOSTS[transport]}
    eventually(lambda: observed.sent("transfer_rows_total", **held) == 64, "the rows are out")
    assert observed.sent("lost_leases_total", **held) == 0
    frozen.freeze()
    assert push.closed.wait(PATIENCE_S)
    assert observed.sent("lost_leases_total", **held) == 1
    assert observed.sent("transfer_failures_total", error="PeerLost", **held) == 1
    eventually(lambda: observed.sent("links_open", **held) == 0, "the end of the link")


def test_reservations_that_nobody_claims_and_rows_that_come_late(observed: Observed) -> None:
    receiver = observed.make_receiver(claim_within_s=0.2)
    ends = {name: Ends() for name in ("unclaimed", "late")}
    reservations = {
        name: receiver.reserve(
            request_id=name,
            attempt=1,
            rows={"kv": [row]},
            timeout_s=60 if name == "unclaimed" else 1.0,
            on_commit=ends[name],
            on_failed=ends[name],
        )
        for row, name in enumerate(ends)
    }
    push = observed.pair.open(reservations["late"])
    for name, end in ends.items():
        assert isinstance(end.wait(), TransferTimeout)
        eventually(lambda name=name: observed.received("reservations_expired_total", cause=name) == 1, name)
        reservations[name].release()
    assert observed.received("transfer_failures_total", error="TransferTimeout", peer="prefill-a") == 1
    push.abort("enough")
    assert push.closed.wait(PATIENCE_S)
    receiver.close()


def test_peers_beyond_the_bound_share_one_name_and_gone_ones_lose_their_series(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(peers, "MAX_PEERS", 2)
    monkeypatch.setattr(observed.receiving.peers, "_clock", lambda: now[0])
    for number in range(4):
        sender = observed.make_sender(f"prefill-{number}")
        reservation, ends = observed.pair.reserve([1], request_id=f"r{number}")
        assert observed.pair.send(reservation, [1], sender=sender).error is None
        ends.wait()
        reservation.release()
        sender.close()
        eventually(lambda: observed.received("links_open") == 0, "the end of the link")
    assert labels_of(observed.decode, "peer") == {"prefill-0", "prefill-1", "other"}
    assert observed.received("transfer_bytes_total", peer="prefill-0") == LAYERS * ROW_BYTES
    assert observed.received("transfer_bytes_total", peer="other") == 2 * LAYERS * ROW_BYTES
    eventually(lambda: not observed.receiver._links, "the links are forgotten")
    now[0] += peers.GONE_S
    assert labels_of(observed.decode, "peer") == {"other"}
    observed.send([1])
    assert labels_of(observed.decode, "peer") == {"prefill-a", "other"}


def test_reports_are_asked_for_once_a_link_and_made_once_a_frame(observed: Observed) -> None:
    calls: list[str] = []

    class Link(NoLinkMetrics):
        def moved(self, rows: int, num_bytes: int) -> None:
            calls.append(f"moved {rows}")

        def queued(self, rows: int, num_bytes: int) -> None:
            calls.append(f"queued {rows}")

    class Links(metrics.NoMetrics):
        def link(self, transport: str, peer: str, *, stranger: bool = False) -> Link:
            calls.append(f"link {peer}")
            return Link()

    sender = observed.make_sender("prefill-b", Links())
    reservation, ends = observed.pair.reserve(range(64))
    assert observed.pair.send(reservation, range(64), sender=sender).error is None
    ends.wait()
    reservation.release()
    sender.close()
    assert sorted(calls) == sorted(["link decode-a", *["moved 64", "queued 64", "queued -64"] * LAYERS])


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ChecksumMismatch("x"), "ChecksumMismatch"),
        (SpeaksTls("x"), "Malformed"),
        (Malformed("x"), "Malformed"),
        (Internal("x"), "Internal"),
        (ZeroDivisionError(), "Internal"),
        (type("Invented", (PeerLost,), {})("x"), "PeerLost"),
    ],
)
def test_errors_have_one_of_a_few_names(error: Exception, name: str) -> None:
    assert error_name(error) == name


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://10.0.0.7:7073", "10.0.0.7"),
        ("mooncake+tcp://node-3.cluster:9000", "node-3.cluster"),
        ("tcp://[fe80::1]:7073", "fe80::1"),
        ("10.0.0.7", "10.0.0.7"),
        ("::1", "::1"),
        ("process 4711", "localhost"),
        ("shm://5f2c6a52-0000-4000-8000-000000000000/0123456789abcdef0123456789abcdef", "localhost"),
    ],
)
def test_peers_without_a_name_go_by_their_host(address: str, host: str) -> None:
    assert host_of(address) == host
