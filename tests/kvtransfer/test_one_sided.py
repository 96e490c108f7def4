"""Links whose payload a library writes: nothing is reused while the library may still read or write it.

The first half replaces the library; the second has the real ones, in real processes.
"""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import pytest

from kvtransfer import wire
from kvtransfer.lease import PeerSilent
from kvtransfer.transports import Link, lookup, one_sided, tcp
from kvtransfer.transports.one_sided import EngineReceiverLink, EngineSenderLink, Segment, registered_spans
from kvtransfer.transports.tcp import TcpLink
from tests.kvtransfer.conftest import TRANSPORTS
from tests.kvtransfer.peers import PATIENCE_S, Ends, Pair, eventually, make_regions, rows_of
from tests.kvtransfer.test_processes import endpoint_and_target, process
from tests.kvtransfer.test_shm import ANOTHERS, Fenced, Writer
from twinpool.errors import ConfigError, PeerLost, TransferTimeout

ENGINES = [name for name in TRANSPORTS if name.startswith(("mooncake", "nixl"))]


class HeldWrites:
    """A library that does nothing until it is told to."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.batches: list[list[Segment]] = []
        self.num_left = 0
        self.is_instant = False
        self.is_closed = False

    def begin(self, segments: Sequence[Segment]) -> None:
        assert self.num_left == 0
        self.batches.append(list(segments))
        self.num_left = 0 if self.is_instant else len(segments)

    def poll(self) -> int:
        return self.num_left

    def stop(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class HeldEngine:
    name = "held"
    metadata = b"m"

    def __init__(self) -> None:
        self.writes = HeldWrites()
        self.expected: set[int] = set()
        self.num_lookups = 0
        self.answers = threading.Event()  # the other engine, when it is looked for
        self.answers.set()

    def reach(self, name: str, metadata: bytes, peer: str) -> HeldWrites:
        assert (name, metadata) == ("held", b"m")
        self.num_lookups += 1
        assert self.answers.wait(PATIENCE_S)
        return self.writes

    def expect_writes(self, owner: object, push: int) -> None:
        self.expected.add(push)

    def forget_writes(self, owner: object, push: int | None = None) -> None:
        self.expected = set() if push is None else self.expected - {push}

    def close(self) -> None: ...


class Ends2:
    """Both ends of one link over a held library, attached."""

    def __init__(self) -> None:
        self.engine = HeldEngine()
        self.regions = make_regions(1, num_rows=600)
        layout = one_sided.layout(self.engine, self.regions)
        accepted: SimpleQueue[Link] = SimpleQueue()
        self.listener = tcp.listen(
            "tcp",
            ("127.0.0.1", 0, None),
            lambda sock, peer: EngineReceiverLink(TcpLink(sock, peer), self.engine, layout),
            accepted.put,
        )
        sock = tcp.dial(self.listener.endpoint, "tcp", self.soon)
        self.sender = EngineSenderLink(TcpLink(sock, "receiver"), self.engine, self.regions)
        self.receiver = accepted.get(timeout=PATIENCE_S)
        self.receiver.share(deadline=self.soon)
        self.sender.attach(deadline=self.soon)

    @property
    def soon(self) -> float:
        return time.monotonic() + PATIENCE_S

    def write(self, rows: Sequence[int], *, region: int = 0, timeout_s: float = PATIENCE_S) -> list[int]:
        sources = [self.regions[0].row(row % 600) for row in rows]
        return self.sender.write(region, rows, sources, deadline=time.monotonic() + timeout_s)

    def close(self) -> None:
        self.engine.writes.num_left = 0
        self.sender.close()
        self.receiver.close()
        self.listener.close()


@pytest.fixture
def ends() -> Iterator[Ends2]:
    ends = Ends2()
    yield ends
    ends.close()


def test_neighbours_travel_together_and_no_batch_is_larger_than_allowed(ends: Ends2) -> None:
    ends.engine.writes.is_instant = True
    assert len(ends.write([7, 8, 9, 20])) == 4
    (joined,) = ends.engine.writes.batches
    assert [segment.num_bytes for segment in joined] == [3000, 1000]
    ends.engine.writes.batches.clear()
    ends.write(range(0, 598, 2))
    ends.write(range(1, 599, 2))
    assert [len(batch) for batch in ends.engine.writes.batches] == [256, 43, 256, 43]


@pytest.mark.parametrize(("region", "row"), [(0, 600), (0, -1), (3, 0)])
def test_a_row_that_the_receiver_does_not_have_is_never_addressed(ends: Ends2, region: int, row: int) -> None:
    with pytest.raises(wire.Malformed):
        ends.write([row], region=region)
    assert ends.engine.writes.batches == []


def test_a_write_that_outlives_its_deadline_pins_its_source_and_the_link(ends: Ends2) -> None:
    with pytest.raises(TransferTimeout, match="1 writes may go on"):
        ends.write([1], timeout_s=0.01)
    ends.sender.close()
    assert not ends.sender.drained(0.01)
    ends.receiver.cut()
    assert not ends.receiver.fenced(0.1)  # it was asked to leave, and may not yet
    ends.engine.writes.num_left = 0
    assert ends.sender.drained(PATIENCE_S)
    assert ends.engine.writes.is_closed


def test_a_write_that_nobody_takes_for_a_lease_is_the_loss_of_its_peer(ends: Ends2) -> None:
    ends.sender.agree(0.3)
    with pytest.raises(PeerSilent, match=r"silent for 0\.3 s"):
        ends.write([1])
    assert not ends.sender.drained(0.01)  # it may still be read: the source stays pinned


def test_a_cut_ends_a_write_at_once_and_is_no_end_for_the_receiver(ends: Ends2) -> None:
    ends.engine.writes.num_left = 1
    ends.sender.cut()
    with pytest.raises(PeerLost, match="closed by this side"):
        ends.write([1])
    assert not ends.receiver.fenced(0.1)


def test_a_sender_that_leaves_in_order_is_a_fence_at_once(ends: Ends2) -> None:
    ends.sender.close()
    with pytest.raises(PeerLost):
        ends.receiver.receive(deadline=ends.soon)
    assert ends.receiver.fenced(0)


def test_a_sender_that_was_killed_is_a_fence_after_the_network_has_drained(
    ends: Ends2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_sided, "DRAIN_S", 0.2)
    ends.sender._control.close()
    with pytest.raises(PeerLost):
        ends.receiver.receive(deadline=ends.soon)
    assert not ends.receiver.fenced(0)
    assert ends.receiver.fenced(PATIENCE_S)


def test_the_end_of_a_killed_sender_is_seen_behind_what_it_had_sent(
    ends: Ends2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_sided, "DRAIN_S", 0)
    ends.receiver.cut()
    ends.sender.start(wire.Abort(push=1, token=bytes(16), request_id="r", attempt=1, reason="x" * 1000))
    assert ends.sender.advance()
    assert not ends.receiver.fenced(0.1)
    ends.sender._control.close()
    assert ends.receiver.fenced(PATIENCE_S)


def test_a_host_that_vanished_is_no_fence_for_long(ends: Ends2, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(deadline: float | None = None) -> wire.Frame:
        raise PeerLost("no answer to keepalives") from OSError(errno.ETIMEDOUT, "timed out")

    monkeypatch.setattr(one_sided, "DRAIN_S", 0)
    monkeypatch.setattr(ends.receiver._control, "receive", time_out)  # type: ignore[attr-defined]
    with pytest.raises(PeerLost):
        ends.receiver.receive(deadline=ends.soon)
    assert not ends.receiver.fenced(0.05)


def test_the_engine_knows_who_may_be_writing(ends: Ends2) -> None:
    for push in (1, 2):
        claim = wire.Claim(push=push, token=bytes(16), request_id="r", attempt=1)
        ends.sender.send(claim, deadline=ends.soon)
        ends.receiver.receive(deadline=ends.soon)
    abort = wire.Abort(push=1, token=bytes(16), request_id="r", attempt=1, reason="")
    ends.sender.send(abort, deadline=ends.soon)
    ends.receiver.receive(deadline=ends.soon)
    assert ends.engine.expected == {2}
    ends.receiver.close()
    assert ends.engine.expected == set()


@pytest.mark.parametrize("message", ["another kind", "other regions"])
def test_a_receiver_that_tells_nonsense_is_left(ends: Ends2, message: str) -> None:
    answers = {
        "another kind": wire.Committed(push=1),
        "other regions": wire.Engine(name="held", metadata=b"m", addresses=bytes(8), num_rows=bytes(4)),
    }
    ends.receiver.send(answers[message], deadline=ends.soon)
    with pytest.raises(PeerLost, match=r"instead of Engine|3 are expected"):
        ends.sender.attach(deadline=ends.soon)


def test_memory_in_one_piece_is_registered_once_and_gaps_are_not() -> None:
    regions = make_regions(1)
    ((_, num_bytes),) = registered_spans(regions)
    assert num_bytes == 3 * 64_000
    assert [size for _, size in registered_spans([regions[0], regions[2]])] == [64_000, 64_000]


def test_too_much_to_tell_is_a_config_error() -> None:
    engine = HeldEngine()
    engine.metadata = bytes(wire.MAX_METADATA_BYTES + 1)
    with pytest.raises(ConfigError, match="in one piece"):
        one_sided.layout(engine, make_regions(1))


# --- the real libraries ---


@pytest.mark.parametrize("library", ENGINES)
@pytest.mark.parametrize("end", ["kill", "thaw"])
def test_a_frozen_writer_keeps_its_rows_in_quarantine_until_it_thaws_or_dies(
    library: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_sided, "DRAIN_S", 1.0)
    pair, writer = Pair(library), Writer(library)
    try:
        fenced = Fenced(pair, [1, 2])
        writer.push(pair, fenced.reservation)
        writer.freeze()
        assert not fenced.reservation.release()
        other, other_ends = pair.reserve([5, 6], request_id="r3")
        assert pair.send(other, [20, 21]).error is None  # others go on
        assert other_ends.wait().rows == 6
        assert fenced.times == 0
        for row in (1, 2):
            pair.destination[0].row(row)[:] = ANOTHERS
        writer.process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGCONT)
        eventually(lambda: fenced.times == 1, "the end of the quarantine")
        assert rows_of(pair.destination[:1], [1, 2]) == [[ANOTHERS, ANOTHERS]]
        assert pair.receiver.num_writers == 0
    finally:
        writer.close()
        pair.close()


@pytest.mark.parametrize("library", ENGINES)
def test_a_cut_link_is_no_fence_while_its_writer_is_frozen(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "DRAIN_S", 0.1)
    pair, writer = Pair(library), Writer(library)
    try:
        fenced = Fenced(pair, [1, 2])
        writer.push(pair, fenced.reservation)
        writer.freeze()
        for link in list(pair.receiver._links):
            link.cut()
        assert isinstance(fenced.ends.wait(), PeerLost)
        assert not fenced.reservation.release()
        assert fenced.times == 0
        writer.process.kill()
        eventually(lambda: fenced.times == 1, "the end of the quarantine")
    finally:
        writer.close()
        pair.close()


@pytest.mark.parametrize("library", ENGINES)
def test_rows_for_a_frozen_receiver_stay_pinned_after_the_push_has_failed(library: str) -> None:
    pair = Pair(library, row_bytes=64 << 10)
    try:
        with process("receiver_process", library, "0") as receiver:
            _, target = endpoint_and_target(receiver)
            push = pair.sender.open(target, request_id="r1", attempt=1, timeout_s=2)
            eventually(push.is_granted, "the grant")
            receiver.send_signal(signal.SIGSTOP)
            time.sleep(0.1)  # until it has stopped
            for layer in range(3):
                push.put(layer, range(64), range(64))
            done = Ends()
            push.commit(b"", done)
            eventually(lambda: push._outbound._ended, "the end of the link")
            assert not push.closed.is_set()  # whatever the deadline says: the library still reads them
            receiver.kill()
            assert push.closed.wait(PATIENCE_S)
            assert isinstance(done.wait().error, TransferTimeout)
    finally:
        pair.close()


@pytest.mark.parametrize("library", ENGINES)
def test_a_process_that_only_waits_uses_no_processor_time(library: str) -> None:
    """Not how much: a thread that spins would use all of it."""
    script = (
        "import sys, time\n"
        "from tests.kvtransfer.peers import Pair\n"
        "pair = Pair(sys.argv[1])\n"
        "pair.assert_serves()\n"
        "time.sleep(0.2)\n"
        "before = time.process_time()\n"
        "time.sleep(2)\n"
        "print((time.process_time() - before) / 2)\n"
        "pair.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, library], capture_output=True, text=True, timeout=60, check=True
    )
    assert float(done.stdout.split()[-1]) < 0.5


@pytest.mark.parametrize("library", ENGINES)
def test_a_process_ends_with_its_own_status_and_says_all_it_had_to(library: str) -> None:
    """Whatever the destructors of its libraries do: NIXL's wheel and a host's RDMA drivers end in SIGSEGV together."""
    script = (
        "import sys\n"
        "from tests.kvtransfer.peers import Pair\n"
        "pair = Pair(sys.argv[1])\n"
        "pair.assert_serves()\n"
        "pair.close()\n"
        "print('closed')\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, library], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 7
    assert done.stdout.split()[-1] == "closed"


def test_a_library_that_never_comes_back_from_its_first_look_holds_nobody_and_is_not_asked_twice() -> None:
    engine = HeldEngine()
    shared = one_sided.layout(engine, make_regions(1))
    engine.answers.clear()
    with pytest.raises(TransferTimeout, match="did not answer the transfer library"):
        lookup.reach(engine, shared, "frozen", deadline=time.monotonic() + 0.05)
    for _ in range(3):
        with pytest.raises(PeerLost, match="still looks for frozen"):
            lookup.reach(engine, shared, "frozen", deadline=time.monotonic() + PATIENCE_S)
    assert engine.num_lookups == 1
    assert not engine.writes.is_closed
    engine.answers.set()
    eventually(lambda: engine.writes.is_closed, "what was found too late is given back")
    assert lookup.reach(engine, shared, "thawed", deadline=time.monotonic() + PATIENCE_S) is engine.writes
    assert engine.num_lookups == 2
