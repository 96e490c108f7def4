"""A client that goes away, at any moment and more than once, frees both sides and hurts nobody."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes import Faults
from tests.flow.cluster import Cluster, wait_until
from tests.flow.oracle import Oracle
from twinpool import errors

PROMPT = list(range(30, 120))


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


def test_closing_a_stream_frees_both_workers(shared: Cluster) -> None:
    with shared.client() as client:
        with client.stream(PROMPT, max_tokens=1500, ignore_eos=True) as stream:
            next(iter(stream))
        shared.assert_baseline(timeout_s=2)


def test_cancel_after_prefill_and_before_the_transfer_ends(
    deploy: Callable[..., Cluster], transport: str
) -> None:  # L1
    cluster = deploy(0, 1, router={"probe_timeout": "0"}, kv_transport=transport)
    cluster.worker("prefill", "prefill-slow", faults=Faults(delay_ms=300), kv_transport=transport)
    cluster.wait_ready("prefill-slow")
    cluster.wait_workers(2)
    with cluster.client() as client:
        with client.stream(PROMPT, max_tokens=200, ignore_eos=True) as stream:
            next(iter(stream))  # the first token comes from the prefill worker, its rows are still on the way
        cluster.assert_baseline(timeout_s=3)
        assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5
    cluster.assert_baseline()


def test_request_that_never_fits_the_decode_worker_frees_the_prefill_side(
    deploy: Callable[..., Cluster], transport: str
) -> None:  # L2
    cluster = deploy(1, 0, kv_transport=transport)
    cluster.worker("decode", "decode-small", memory="96KiB", kv_transport=transport)
    cluster.wait_ready("decode-small")
    cluster.wait_workers(2)
    with cluster.client(retries=0, timeout_s=30) as client:
        with pytest.raises(errors.InvalidRequest):
            client.generate(list(range(10, 240)) * 6, max_tokens=5)
        cluster.assert_baseline(timeout_s=2)
        assert len(client.generate(PROMPT[:20], max_tokens=5, ignore_eos=True).token_ids) == 5
    cluster.assert_baseline()


def test_cancelling_three_times_around_the_end_is_harmless(
    deploy: Callable[..., Cluster], oracle: Oracle, transport: str
) -> None:  # L8
    cluster = deploy(1, 1, kv_transport=transport)
    with cluster.client() as client:
        for tokens in (1, 2, 3, 8):
            stream = client.stream(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True)
            assert list(next(iter(stream)).token_ids)[:1] == oracle.answer(PROMPT, 1, ignore_eos=True)
            for _ in range(3):
                stream.close()
        answer = client.generate(PROMPT, max_tokens=5, temperature=0, ignore_eos=True)
        assert answer.token_ids == oracle.answer(PROMPT, 5, ignore_eos=True)
    cluster.assert_baseline()
    assert all(process.popen.poll() is None for process in cluster.processes.values())


def test_a_short_prompt_does_not_wait_for_cancelled_long_ones(
    deploy: Callable[..., Cluster], transport: str
) -> None:  # L10
    cluster = deploy(0, 1, kv_transport=transport, memory="32MiB")
    prefill = cluster.worker("prefill", "prefill-0", kv_transport=transport, memory="32MiB", token_budget="32")
    cluster.wait_ready("prefill-0")
    cluster.wait_workers(2)

    def steps() -> float:
        return prefill.metric("twinpool_prefill_step_seconds_count")

    with cluster.client(timeout_s=60) as client:
        streams = [client.stream([20 + number] * 1500, max_tokens=2) for number in range(10)]
        wait_until(lambda: steps() >= 2, "the first long prompt is being computed")
        for stream in streams:
            stream.close()
        wait_until(lambda: not _running(cluster), "the router has dropped them", 5)
        before = steps()
        assert before < 200  # of some 470 that all ten need
        assert len(client.generate([50, 60, 70], max_tokens=1).token_ids) == 1
        assert steps() - before <= 2  # the step that was running, and its own
    cluster.assert_baseline()


def test_a_hundred_cancels_at_random_moments_leave_nothing(shared: Cluster, oracle: Oracle) -> None:  # L9
    draw = random.Random(11)
    plans = [
        (draw.randrange(1, 40), [draw.randrange(10, 250) for _ in range(draw.randrange(3, 200))]) for _ in range(100)
    ]

    def ask_and_leave(plan: tuple[int, list[int]]) -> None:
        after, prompt = plan
        with client.stream(prompt, max_tokens=300, ignore_eos=True, temperature=0.7) as stream:
            for number, _ in enumerate(stream):
                if number == after:
                    return

    def ask_with_a_short_deadline(plan: tuple[int, list[int]]) -> None:
        after, prompt = plan
        with contextlib.suppress(errors.DeadlineExceeded, errors.Overloaded):
            client.generate(prompt, max_tokens=300, ignore_eos=True, deadline_s=after / 200)

    with shared.client(timeout_s=60) as client, ThreadPoolExecutor(12) as threads:
        list(threads.map(ask_and_leave, plans[:50]))
        list(threads.map(ask_with_a_short_deadline, plans[50:]))
        shared.assert_baseline()
        answer = client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    assert answer.token_ids == oracle.answer(PROMPT, 20, ignore_eos=True)


def test_client_process_that_vanishes_is_noticed(shared: Cluster) -> None:
    client = shared.client()
    stream = client.stream(PROMPT, max_tokens=1500, ignore_eos=True)
    next(iter(stream))
    client.close()  # the channel goes away with its call still open
    wait_until(lambda: not _running(shared), "router dropped the request", 5)


def _running(cluster: Cluster) -> int:
    with cluster.client() as client:
        return client.pools().running
