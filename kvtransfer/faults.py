"""Faults on purpose, for tests of everything around a transfer: a sender's links are wrapped at the transport seam.

A specification is a comma-separated list, as in "delay_ms=500,fail_fraction=0.1,seed=1" (TWINPOOL_KV_FAULTS):

    delay_ms=N          what is sent arrives N ms later, in order; the sender goes on as if it had left
    drop_after_rows=N   every link breaks when N rows have left on it
    corrupt_every=N     one bit of every N-th row is flipped on its way (the sender's memory is untouched)
    fail_fraction=F     this fraction of commits carries a wrong digest
    seed=N              makes the choices repeatable

Without a specification no link is wrapped and nothing of this runs.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtransfer import wire
from kvtransfer.digest import row_checksum
from kvtransfer.transports import Link
from twinpool.errors import ConfigError, PeerLost, TransferTimeout

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What to inject; 0 means: nothing of that kind."""

    delay_ms: float = 0
    drop_after_rows: int = 0
    corrupt_every: int = 0
    fail_fraction: float = 0
    seed: int = 0

    @classmethod
    def parse(cls, specification: str) -> Faults | None:
        """None for an empty specification. Raises ConfigError naming the part that cannot be read."""
        values: dict[str, float | int] = {}
        kinds = {"delay_ms": float, "drop_after_rows": int, "corrupt_every": int, "fail_fraction": float, "seed": int}
        for part in filter(None, (part.strip() for part in specification.split(","))):
            name, _, text = part.partition("=")
            try:
                values[name] = kinds[name](text)
                if not 0 <= values[name] < float("inf") or (name == "fail_fraction" and values[name] > 1):
                    raise ValueError
            except (KeyError, ValueError):
                raise ConfigError(
                    f"KV fault {part!r} cannot be read: give NAME=NUMBER with NAME one of {', '.join(kinds)}"
                ) from None
        if not values:
            return None
        faults = cls(**values)  # type: ignore[arg-type]  # each value was made by its field's own type
        log.warning("INJECTING FAULTS INTO KV TRANSFERS: %s", faults)
        return faults

    def wrap(self, link: Link) -> Link:
        return FaultyLink(link, self)


class FaultyLink:
    """A link that damages, delays or drops what is sent; what is received passes untouched."""

    def __init__(self, link: Link, faults: Faults) -> None:
        self.peer = link.peer
        self._link = link
        self._faults = faults
        self._random = random.Random(faults.seed or None)
        self._num_rows = 0
        self.one_sided = link.one_sided
        self.fileno = link.fileno
        self.receive = link.receive
        self.receive_ready = link.receive_ready
        self.fill = link.fill
        self.fill_rows = link.fill_rows
        self.skip = link.skip
        self.share = link.share
        self.attach = link.attach
        self.fenced = link.fenced
        self.drained = link.drained
        self.cut = link.cut
        self._delayed: queue.SimpleQueue[tuple[float, Callable[[], object]] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._late = threading.Thread(target=self._send_late, name=f"kv-delay {link.peer}", daemon=True)
        if faults.delay_ms:
            self._late.start()

    def start(self, message: wire.Message, payload: Sequence[memoryview] = ()) -> None:
        if isinstance(message, wire.Commit) and self._random.random() < self._faults.fail_fraction:
            message = replace(message, digest=bytes(len(message.digest)))
        if self._faults.delay_ms:
            copied = [memoryview(b"".join(payload))] if payload else []
            self._delay(lambda: self._link.send(message, copied, deadline=time.monotonic() + _SEND_TIMEOUT_S))
        else:
            self._link.start(message, payload)

    def start_rows(self, message: wire.Put, rows: Sequence[memoryview]) -> list[int]:
        checksums = [row_checksum(row) for row in rows]
        self.start(message, [*self._damaged(len(rows), rows), memoryview(wire.pack_u64(checksums))])
        return checksums

    def write(self, region: int, rows: Sequence[int], sources: Sequence[memoryview], *, deadline: float) -> list[int]:
        checksums = [row_checksum(source) for source in sources]
        sent = [self._damaged(1, [memoryview(bytearray(source))])[0] for source in sources]
        if self._faults.delay_ms:
            self._delay(lambda: self._link.write(region, rows, sent, deadline=deadline))
        else:
            self._link.write(region, rows, sent, deadline=deadline)
        return checksums

    def _delay(self, act: Callable[[], object]) -> None:
        self._delayed.put((time.monotonic() + self._faults.delay_ms / 1000, act))

    def advance(self) -> bool:
        return bool(self._faults.delay_ms) or self._link.advance()

    def send(self, message: wire.Message, payload: Sequence[memoryview] = (), *, deadline: float) -> None:
        self._link.send(message, payload, deadline=deadline)

    def close(self) -> None:
        self._stop.set()
        self._delayed.put(None)
        self._link.cut()
        if self._late.is_alive():
            self._late.join()
        self._link.close()

    def _damaged(self, num_rows: int, payload: Sequence[memoryview]) -> Sequence[memoryview]:
        before, self._num_rows = self._num_rows, self._num_rows + num_rows
        if 0 < self._faults.drop_after_rows < self._num_rows:
            self._link.cut()
            raise PeerLost(f"injected: the link to {self.peer} breaks after {self._faults.drop_after_rows} rows")
        every = self._faults.corrupt_every
        if not every:
            return payload
        rows = bytearray(b"".join(payload))
        row_bytes = len(rows) // num_rows
        for row in range(num_rows):
            if (before + row + 1) % every == 0:
                rows[row * row_bytes + self._random.randrange(row_bytes)] ^= 1 << self._random.randrange(8)
        return [memoryview(rows)]

    def _send_late(self) -> None:
        while (item := self._delayed.get()) is not None:
            due, act = item
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
            try:
                act()
            except (PeerLost, TransferTimeout):
                self._link.cut()  # its owner learns from the reading side
                return
