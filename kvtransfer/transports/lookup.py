"""A transfer library's first look at another process, by a deadline of ours: the libraries have none for it.

One that does not come back in time is left to itself in its thread, and what it finds after all is given back. As long
as it is under way nobody else looks for the same process: a frozen peer costs one thread, not one a request.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from twinpool.errors import PeerLost, TransferTimeout

if TYPE_CHECKING:
    from kvtransfer.transports.one_sided import Engine, Writes
    from kvtransfer.wire import Engine as Description

_lock = threading.Lock()
_under_way: set[tuple[int, str]] = set()  # (id of the engine that looks, name of the one looked for)


class _Lookup:
    def __init__(self, engine: Engine, shared: Description, peer: str) -> None:
        self.writes: Writes | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.is_given_up = False
        self._engine = engine  # kept, whoever closes it
        self._shared = shared
        self._peer = peer

    def run(self) -> None:
        try:
            self.writes = self._engine.reach(self._shared.name, self._shared.metadata, self._peer)
        except BaseException as exc:
            self.error = exc
        with _lock:
            _under_way.discard((id(self._engine), self._shared.name))
            is_late = self.is_given_up
            self.ended.set()
        if is_late and self.writes is not None:
            self.writes.close()


def reach(engine: Engine, shared: Description, peer: str, *, deadline: float) -> Writes:
    """`engine.reach` of what describes itself so. Raises what that raises, and TransferTimeout."""
    lookup, key = _Lookup(engine, shared, peer), (id(engine), shared.name)
    with _lock:
        if key in _under_way:
            raise PeerLost(f"the transfer library still looks for {peer}, which does not answer it")
        _under_way.add(key)
    threading.Thread(target=lookup.run, name="kv-lookup", daemon=True).start()
    lookup.ended.wait(max(0.0, deadline - time.monotonic()))
    with _lock:
        lookup.is_given_up = not lookup.ended.is_set()
    if lookup.is_given_up:
        raise TransferTimeout(f"{peer} did not answer the transfer library in time")
    if lookup.error is not None:
        raise lookup.error
    assert lookup.writes is not None
    return lookup.writes
