"""Answers on their way to clients: after each message of a worker one pass writes what is new to every stream.

Waking a task for every stream would cost as much as all else that the router does to a token. Instead:

1. a request with news marks its stream; the first mark of a pass schedules the pass
2. the pass builds a message for each marked stream that has none on its way, and runs `context.write`, a coroutine, by
   hand up to what it waits for; a callback runs it on from there
3. while a message is on its way, what comes meanwhile waits and goes out together in the next: gRPC holds one message a
   stream, however slow its client is
4. passes get a third of the time at most, taken over the last 50 ms; the next one waits until that holds again. Below
   it nothing waits and nothing is joined. With it a router that falls behind sends fewer, larger messages, and always
   has time to read the workers' next ones. A router that wrote whenever there was something would alternate between
   one message read and a pass over all streams, and never catch up

Why a third: writing is near half of what a token costs, the other half being what gRPC does before and after, and the
router's own work. So passes need a third of the time when the router is about 70 % busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from router.choice import Delta

Write = Callable[[list[Delta]], Coroutine[Any, Any, None]]  # starts one message

_SHARE = 1 / 3  # of the time, for passes
_OVER_S = 0.05  # that the share is taken over: what was not used longer ago is lost
_LONGEST_PASS_S = 0.02  # that counts: one that took longer was kept from its core


class Chunks:
    """The passes. Owned by one event loop."""

    def __init__(self) -> None:
        self._marked: list[ChunkStream] = []
        # Until when the passes so far have used their share; in the past while they have not. On time.perf_counter:
        # the loop's own clock stands still within an iteration.
        self._used_until = 0.0

    def mark(self, stream: ChunkStream) -> None:
        if not self._marked:
            loop, left_s = asyncio.get_running_loop(), self._used_until - time.perf_counter()
            if left_s > 0:
                loop.call_later(left_s, self._pass)
            else:
                loop.call_soon(self._pass)
        self._marked.append(stream)

    def _pass(self) -> None:
        begin = time.perf_counter()
        marked, self._marked = self._marked, []
        for stream in marked:
            stream.flush()
        took_s = min(time.perf_counter() - begin, _LONGEST_PASS_S)
        self._used_until = max(self._used_until, begin - _OVER_S) + took_s / _SHARE


class ChunkStream:
    """One answer. `take` gives what is new, `write` sends it; `sent` returns when there is no more of either."""

    def __init__(self, chunks: Chunks, take: Callable[[], list[Delta]], write: Write) -> None:
        self._chunks = chunks
        self._take = take
        self._write = write
        self._has_news = False
        self._is_marked = False
        self._writing: Coroutine[Any, Any, None] | None = None
        self._is_last = False
        self._sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def news(self) -> None:
        """There is something to take."""
        self._has_news = True
        if not self._is_marked and self._writing is None:
            self._is_marked = True
            self._chunks.mark(self)

    def end(self) -> None:
        """Nothing new comes after what there is to take now."""
        self._is_last = True
        self.news()

    async def sent(self) -> None:
        """Returns after `end` and the last write. Raises what `write` raised."""
        await self._sent

    def close(self) -> None:
        """Gives up what has not been written. Idempotent."""
        self._sent.cancel()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()

    def flush(self) -> None:
        self._is_marked = False
        if self._writing is not None or self._sent.done():
            return
        self._has_news = False
        fresh = self._take()
        if fresh:
            self._writing = self._write(fresh)
            self._run_on(None)
        elif self._is_last:
            self._sent.set_result(None)

    def _run_on(self, _waited_for: asyncio.Future[Any] | None) -> None:
        writing = self._writing
        if writing is None:
            return  # closed meanwhile
        try:
            future = writing.send(None)
        except StopIteration:
            self._writing = None
            if self._has_news or self._is_last:
                self.news()
        except BaseException as error:  # of gRPC, mostly because the client is gone
            self._writing = None
            if isinstance(error, asyncio.CancelledError):
                self._sent.cancel()
            elif not self._sent.done():
                self._sent.set_exception(error)
        else:
            if future is None:  # a bare yield
                asyncio.get_running_loop().call_soon(self._run_on, None)
            else:
                future.add_done_callback(self._run_on)
