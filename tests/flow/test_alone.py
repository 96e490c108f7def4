"""One worker does all, with real processes: local prefill, and whole answers while a pool is empty."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Faults
from tests.flow.cluster import Cluster, wait_until
from tests.flow.oracle import Oracle
from tests.flow.test_answers import prompts
from twinpool import errors

LONG = 600
PROMPT = list(range(20, 90))
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 77, "ignore_eos": True}


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture
def both(deploy: Callable[..., Cluster]) -> Iterator[Cluster]:
    """The same two workers behind a router that splits and one that leaves prompts to the decode worker."""
    cluster = deploy(0, 0)
    cluster.router("router-local", local_prefill_below="100000")
    cluster.worker("prefill", "prefill-0")
    cluster.worker("decode", "decode-0", prefill_chunk="32")
    cluster.wait_ready()
    for router in ("router", "router-local"):
        cluster.wait_workers(2, router)
    yield cluster
    cluster.assert_baseline()


def test_local_prefill_answers_what_the_pools_and_one_process_do(both: Cluster, oracle: Oracle) -> None:
    asked = prompts(12, seed=21, high=200)
    with both.client() as split, both.client("router-local") as local:
        for prompt in asked:
            answer = local.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
            assert answer.timeline.mode == "local"
            assert answer.timeline.prefill_worker == answer.timeline.decode_worker == "decode-0"
            assert answer.timeline.transfer_bytes == 0
            assert answer.token_ids == oracle.answer(prompt, 24, ignore_eos=True)
        cases: list[dict[str, Any]] = [
            {**SEEDED, "n": 3},
            {"temperature": 0, "logprobs": 3, "echo": True},
            {"temperature": 0, "ignore_eos": True, "stop": [split.detokenize(answer.token_ids[5:7])]},
            {**SEEDED, "repetition_penalty": 1.2, "min_p": 0.01, "logprobs": 0},
        ]
        for case in cases:
            one, two = (client.generate(asked[-1], max_tokens=20, **case) for client in (split, local))
            assert one.timeline.mode == "split"
            assert two.timeline.mode == "local"
            assert [choice.token_ids for choice in one.choices] == [choice.token_ids for choice in two.choices]
            assert [choice.logprobs for choice in one.choices] == [choice.logprobs for choice in two.choices]
            assert [choice.text for choice in one.choices] == [choice.text for choice in two.choices]
            assert one.usage.completion_tokens == two.usage.completion_tokens
    worker = both.processes["decode-0"]
    assert worker.metric("twinpool_decode_local_prefill_tokens_total") >= sum(map(len, asked))


def test_local_prefill_beside_running_answers_changes_none_of_them(both: Cluster, oracle: Oracle) -> None:
    asked = prompts(24, seed=22, high=150)
    with both.client(timeout_s=60) as split, both.client("router-local", timeout_s=60) as local:
        with ThreadPoolExecutor(12) as threads:
            calls = [
                threads.submit(client.generate, prompt, max_tokens=24, temperature=0, ignore_eos=True)
                for prompt in asked
                for client in (split, local)
            ]
            answers = [call.result().token_ids for call in calls]
    for i, prompt in enumerate(asked):
        expected = oracle.answer(prompt, 24, ignore_eos=True)
        assert answers[2 * i] == answers[2 * i + 1] == expected


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_one_pool_serves_whole_answers_until_the_other_is_there(
    deploy: Callable[..., Cluster], oracle: Oracle, pool: str
) -> None:  # R5
    cluster = deploy(int(pool == "prefill"), int(pool == "decode"))
    other = "decode" if pool == "prefill" else "prefill"
    with cluster.client(timeout_s=60) as client, ThreadPoolExecutor(8) as threads:
        asked = prompts(16, seed=23, high=120)
        calls = [
            threads.submit(client.generate, prompt, max_tokens=20, temperature=0, ignore_eos=True) for prompt in asked
        ]
        for prompt, call in zip(asked, calls, strict=True):
            assert call.result().token_ids == oracle.answer(prompt, 20, ignore_eos=True)
            assert call.result().timeline.mode == "aggregated"
            assert call.result().timeline.decode_worker == f"{pool}-0"
        alone = client.generate(PROMPT, max_tokens=20, n=3, logprobs=1, **SEEDED)
        assert client.pools().mode == "aggregated"
        assert cluster.processes["router"].metric("twinpool_router_aggregating") == 1
        cluster.worker(other, f"{other}-0")
        cluster.wait_ready(f"{other}-0")
        cluster.wait_workers(2)
        again = client.generate(PROMPT, max_tokens=20, n=3, logprobs=1, **SEEDED)
        assert again.timeline.mode == "split"
        assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in alone.choices]
        assert [choice.logprobs for choice in again.choices] == [choice.logprobs for choice in alone.choices]
        assert client.pools().mode == "split"
    assert cluster.processes["router"].metric("twinpool_router_attempts_total", mode="aggregated") >= 17
    cluster.assert_baseline()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_last_worker_of_a_pool_killed_mid_answer_leaves_no_gap(
    deploy: Callable[..., Cluster], oracle: Oracle, pool: str
) -> None:  # R5
    cluster = deploy(1, 1)
    other = "decode-0" if pool == "prefill" else "prefill-0"
    with cluster.client(timeout_s=60) as client:
        with client.stream(PROMPT, max_tokens=LONG, temperature=0, ignore_eos=True) as stream:
            chunks = iter(stream)
            tokens = [token for _ in range(20) for token in next(chunks).token_ids]
            cluster.processes[f"{pool}-0"].kill()
            for chunk in chunks:
                tokens += chunk.token_ids
        assert tokens == oracle.answer(PROMPT, LONG, ignore_eos=True)
        answer = client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        assert answer.token_ids == oracle.answer(PROMPT, 20, ignore_eos=True)
        assert answer.timeline.decode_worker == other
        assert answer.timeline.mode == "aggregated"
    cluster.assert_baseline()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_cancel_deadline_and_drain_hold_where_one_worker_does_all(
    deploy: Callable[..., Cluster], oracle: Oracle, pool: str
) -> None:  # R5
    cluster = deploy(int(pool == "prefill"), int(pool == "decode"))
    worker = cluster.processes[f"{pool}-0"]
    gauge = "twinpool_prefill_generating" if pool == "prefill" else "twinpool_decode_running"
    with cluster.client(retries=0, timeout_s=60) as client, ThreadPoolExecutor(4) as threads:
        with client.stream(PROMPT, max_tokens=1500, ignore_eos=True) as stream:
            next(stream)
        cluster.assert_baseline()
        with pytest.raises(errors.DeadlineExceeded):
            client.generate(PROMPT, max_tokens=1500, ignore_eos=True, stop="\n\nnever", deadline_s=0.4)
        cluster.assert_baseline()
        calls = [
            threads.submit(client.generate, PROMPT, max_tokens=LONG, temperature=0, ignore_eos=True) for _ in range(4)
        ]
        wait_until(lambda: worker.metric(gauge) == 4, "all four run")
        os.kill(worker.popen.pid, signal.SIGTERM)
        expected = oracle.answer(PROMPT, LONG, ignore_eos=True)
        assert [call.result().token_ids for call in calls] == [expected] * 4
        assert [call.result().timeline.attempts for call in calls] == [1] * 4
        assert worker.popen.wait(20) == 0


def test_more_answers_than_a_lone_prefill_worker_has_rows_for(deploy: Callable[..., Cluster], oracle: Oracle) -> None:
    cluster = deploy(1, 0, memory="256KiB")
    with cluster.client(timeout_s=100) as client, ThreadPoolExecutor(12) as threads:
        asked = prompts(12, seed=24, low=60)
        calls = [
            threads.submit(client.generate, prompt, max_tokens=240, temperature=0, ignore_eos=True) for prompt in asked
        ]
        for prompt, call in zip(asked, calls, strict=True):
            assert call.result().token_ids == oracle.answer(prompt, 240, ignore_eos=True)
    assert cluster.processes["prefill-0"].metric("twinpool_prefill_preemptions_total") > 0
    cluster.assert_baseline()


# Readiness.


def test_worker_is_used_once_a_generation_has_passed_through_it(deploy: Callable[..., Cluster]) -> None:
    cluster = deploy(1, 0, router={"when_pool_empty": "fail"})

    def worker(name: str) -> Any:
        return next((each for each in client.pools().workers if each.worker_id == name), None)

    with cluster.client(retries=0, timeout_s=30) as client:
        alone = wait_until(lambda: worker("prefill-0"), "the worker joins")
        assert alone.state == "joining"
        assert alone.reason == "no decode worker fits it: a generation has to pass through both"
        with pytest.raises(errors.PoolEmpty, match="no decode worker fits it"):
            client.generate(PROMPT, max_tokens=5)
        cluster.worker("decode", "decode-0")
        cluster.wait_ready("decode-0")
        cluster.wait_workers(2)
        assert cluster.processes["router"].metric("twinpool_router_probes_total", outcome="passed") == 1
        assert cluster.processes["decode-0"].metric("twinpool_decode_transfer_rows_total") > 0
        cluster.worker("prefill", "prefill-bad", faults=Faults(corrupt_every=2))
        cluster.wait_ready("prefill-bad")
        wait_until(
            lambda: "its probe with decode-0 failed" in getattr(worker("prefill-bad"), "reason", ""), "found out"
        )
        for _ in range(10):
            answer = client.generate(PROMPT, max_tokens=5, ignore_eos=True)
            assert (answer.timeline.prefill_worker, answer.timeline.attempts) == ("prefill-0", 1)
        assert worker("prefill-bad").state in ("joining", "probing")
    cluster.assert_baseline()
