"""Writing answers to clients: one message a stream on its way at most, what comes meanwhile goes into the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from router.choice import Delta
from router.chunks import Chunks, ChunkStream
from router.wire import Token
from twinpool.sampling import FinishReason


class Client:
    """Takes a message whenever `let` is called; `written` are the token ids of each."""

    def __init__(self, chunks: Chunks, failure: BaseException | None = None) -> None:
        self.fresh: list[int] = []
        self.written: list[list[int]] = []
        self.closed = False
        self.busy_s = 0.0  # that starting a message keeps the loop busy
        self._failure = failure
        self._busy: asyncio.Future[None] | None = None
        self.stream = ChunkStream(chunks, self._take, self._write)

    def say(self, tokens: Sequence[int]) -> None:
        self.fresh += tokens
        self.stream.news()

    async def let(self) -> None:
        assert self._busy is not None
        self._busy.set_result(None)
        await settled()

    def _take(self) -> list[Delta]:
        taken, self.fresh = self.fresh, []
        return [Delta(0, "", [Token(each) for each in taken], FinishReason.NONE)] if taken else []

    async def _write(self, deltas: list[Delta]) -> None:
        try:
            time.sleep(self.busy_s)  # noqa: ASYNC251  it is the loop that is to be busy
            self.written += [[token.token_id for token in delta.tokens] for delta in deltas]
            await asyncio.sleep(0)  # a bare yield
            if self._failure is not None:
                raise self._failure
            self._busy = asyncio.get_running_loop().create_future()
            await self._busy
        except GeneratorExit:
            self.closed = True
            raise


async def settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0.001)  # passes are far from their share here


async def test_each_token_goes_out_at_once_and_those_behind_a_slow_client_together() -> None:
    client = Client(Chunks())
    client.say([1])
    await settled()
    assert client.written == [[1]]
    for token in (2, 3, 4):
        client.say([token])
        await settled()
    assert client.written == [[1]]  # one message on its way, no more
    await client.let()
    assert client.written == [[1], [2, 3, 4]]
    await client.let()
    client.say([5])
    await settled()
    assert client.written[-1] == [5]


async def test_tokens_of_one_pass_share_a_message() -> None:
    chunks = Chunks()
    one, two = Client(chunks), Client(chunks)
    for token in (1, 2, 3):
        one.say([token])
        two.say([10 * token])
    await settled()
    assert (one.written, two.written) == ([[1, 2, 3]], [[10, 20, 30]])


async def test_passes_that_took_their_share_wait_and_the_workers_messages_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that falls behind reads more between two passes, and so sends fewer messages."""
    chunks = Chunks()
    slow, other = Client(chunks), Client(chunks)
    monkeypatch.setattr("router.chunks._LONGEST_PASS_S", 10.0)
    slow.busy_s = 0.2
    slow.say([1])
    await settled()
    for token in (2, 3, 4):
        other.say([token])
        await settled()
    assert (slow.written, other.written) == ([[1]], [])
    async with asyncio.timeout(5):
        while not other.written:
            await asyncio.sleep(0.001)
    assert other.written == [[2, 3, 4]]


async def test_passes_below_their_share_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.chunks._OVER_S", 10.0)
    chunks = Chunks()
    clients = [Client(chunks) for _ in range(5)]
    for client in clients:
        client.busy_s = 0.01
        client.say([1])
        await asyncio.sleep(0)
        assert client.written == [[1]]  # in the loop's very next round


async def test_the_end_comes_after_everything_that_came_before_it() -> None:
    client = Client(Chunks())
    sent = asyncio.ensure_future(client.stream.sent())
    client.say([1])
    await settled()
    client.say([2])
    client.stream.end()
    await settled()
    assert not sent.done()
    await client.let()
    assert client.written == [[1], [2]]
    assert not sent.done()
    await client.let()
    await asyncio.wait_for(sent, 1)


async def test_an_answer_without_tokens_ends_too() -> None:
    client = Client(Chunks())
    client.stream.end()
    await asyncio.wait_for(client.stream.sent(), 1)
    assert client.written == []


async def test_a_write_that_fails_ends_its_stream_and_no_other() -> None:
    chunks = Chunks()
    broken, whole = Client(chunks, OSError("the client is gone")), Client(chunks)
    broken.say([1])
    whole.say([2])
    with pytest.raises(OSError, match="the client is gone"):
        await asyncio.wait_for(broken.stream.sent(), 1)
    broken.say([3])  # nobody takes it any more
    await settled()
    assert broken.written == [[1]]
    await whole.let()
    whole.say([4])
    await settled()
    assert whole.written == [[2], [4]]


async def test_a_cancelled_write_cancels_who_waits_for_the_end() -> None:
    client = Client(Chunks(), asyncio.CancelledError())
    client.say([1])
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(client.stream.sent(), 1)


async def test_closing_gives_up_the_message_on_its_way() -> None:
    client = Client(Chunks())
    client.say([1])
    await settled()
    client.stream.close()
    client.stream.close()
    assert client.closed
    client.say([2])
    await client.let()  # what it waited for comes after all
    assert client.written == [[1]]
