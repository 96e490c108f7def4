"""A router that stops answering without closing anything (SIGSTOP: a paused container, a dead link) is noticed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from twinpool import AsyncClient, Client, errors


@pytest.fixture
def frozen() -> Iterator[subprocess.Popen[str]]:
    """A router process that sends one token and then nothing; `args` holds its address."""
    command = [sys.executable, "-m", "tests.twinpool.fake_router"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.args = process.stdout.readline().strip()
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_stream_from_a_frozen_router_ends_long_before_its_deadline(frozen: subprocess.Popen[str]) -> None:
    with Client(str(frozen.args), keepalive_s=0.5, timeout_s=60) as client:
        stream = client.stream("hi")
        next(stream)
        frozen.send_signal(signal.SIGSTOP)
        with pytest.raises(errors.Unavailable):
            next(stream)


async def test_an_async_stream_from_a_frozen_router_ends_long_before_its_deadline(
    frozen: subprocess.Popen[str],
) -> None:
    async with AsyncClient(str(frozen.args), keepalive_s=0.5, timeout_s=60) as client:
        stream = client.stream("hi")
        await anext(stream)
        frozen.send_signal(signal.SIGSTOP)
        with pytest.raises(errors.Unavailable):
            await anext(stream)
