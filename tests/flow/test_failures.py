"""The failure table of docs/architecture.md, row by row, with real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Faults
from tests.flow.cluster import Cluster, wait_until
from tests.flow.oracle import Oracle
from twinpool import errors
from twinpool.client import Client

LONG = 600  # output tokens: long enough to be caught in the middle
PROMPT = list(range(20, 90))


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([11] * 5000, {}, "prompt"),
        ("", {}, "prompt"),
        ([11, 10**6], {}, "token_ids"),
        ("hi", {"temperature": -1.0}, "temperature"),
        ("hi", {"top_p": 0.0}, "top_p"),
        ("hi", {"n": 0}, "n"),
        ("hi", {"sla_class": "platinum"}, "sla_class"),
    ],
)
def test_bad_request_names_the_field_and_reserves_nothing(
    shared: Cluster, prompt: object, options: dict[str, object], field: str
) -> None:
    with shared.client() as client:
        with pytest.raises(errors.InvalidRequest) as caught:
            client.generate(prompt, max_tokens=4, **options)
    assert field in (caught.value.field or "") or field in caught.value.message


def test_unknown_model_is_named(shared: Cluster) -> None:
    with shared.client() as client, pytest.raises(errors.UnknownModel, match="no-such-model"):
        client.generate("hi", model="no-such-model")


def test_full_queue_refuses_at_once_with_retry_after(deploy: Callable[..., Cluster]) -> None:
    cluster = deploy(1, 1, memory="1MiB")
    with cluster.client(retries=0, timeout_s=60) as client, ThreadPoolExecutor(400) as threads:
        futures = [
            threads.submit(client.generate, PROMPT, max_tokens=150, temperature=0, ignore_eos=True) for _ in range(400)
        ]
        failures = [future.exception() for future in futures]
        assert all(len(f.result().token_ids) == 150 for f in futures if f.exception() is None)
    refusals = [failure for failure in failures if isinstance(failure, errors.Overloaded)]
    assert refusals
    assert all(refusal.retry_after_s is not None and refusal.retry_after_s > 0 for refusal in refusals)
    others = [failure for failure in failures if failure is not None and failure not in refusals]
    assert all(isinstance(failure, errors.DeadlineExceeded) for failure in others), others
    cluster.assert_baseline()


def test_deadline_ends_the_request_on_both_workers(shared: Cluster) -> None:
    with shared.client(retries=0) as client:
        with pytest.raises(errors.DeadlineExceeded):
            # with a stop string nobody can know how long the answer gets
            client.generate(PROMPT, max_tokens=1500, ignore_eos=True, stop="\n\nnever", deadline_s=0.4)
    shared.assert_baseline()


def test_deadline_that_cannot_be_kept_is_refused_at_once_with_retry_after(shared: Cluster) -> None:
    with shared.client(retries=0) as client:
        for _ in range(10):  # until the router knows how fast each worker is
            for _ in range(12):  # long enough for a pace to show
                client.generate(PROMPT, max_tokens=48, ignore_eos=True)
            with pytest.raises((errors.Overloaded, errors.DeadlineExceeded)) as caught:
                client.generate(PROMPT, max_tokens=1500, ignore_eos=True, deadline_s=0.1)
            if isinstance(caught.value, errors.Overloaded):
                break
        assert isinstance(caught.value, errors.Overloaded)
        assert "until its deadline; give it more time" in caught.value.message
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s > 0
    shared.assert_baseline()


def test_explain_tells_what_was_predicted_and_chosen(shared: Cluster) -> None:
    with shared.client() as client:
        answer = client.generate(PROMPT, max_tokens=5, ignore_eos=True, request_id="why", sla_class="batch")
        (decision,) = client.explain("why")
        assert (decision.sla_class, decision.input_class, decision.policy) == ("batch", "short", "predict")
        chosen = decision.candidates[0]
        assert chosen.prefill_worker == answer.timeline.prefill_worker
        assert chosen.decode_worker == answer.timeline.decode_worker
        assert len(decision.candidates) == 4  # two of each
        line = next(each for each in shared.processes["router"].log_records("request") if each["request_id"] == "why")
        assert line["reason"] == decision.reason
        assert line["candidates"][0]["prefill_worker"] == chosen.prefill_worker
        with pytest.raises(errors.UnknownRequest, match="no placement of request 'other'"):
            client.explain("other")


def test_cached_prefixes_are_shared_only_under_the_same_salt(shared: Cluster) -> None:  # X4
    prompt = [(11 * i) % 200 + 20 for i in range(200)]
    with shared.client() as client:

        def cached(salt: str) -> int:
            return client.generate(prompt, max_tokens=2, ignore_eos=True, cache_salt=salt).usage.cached_tokens

        assert cached("tenant a") == 0
        wait_until(lambda: cached("tenant a") >= 192, "the prefix draws the request to where it is cached")
        assert cached("tenant b") == 0
    shared.assert_baseline()


def test_with_isolated_tenants_no_cached_prefix_crosses_from_one_to_another(
    deploy: Callable[..., Cluster],
) -> None:  # X4
    cluster = deploy(0, 0)
    cluster.processes.pop("router").stop()
    cluster.router(env={"TWINPOOL_ISOLATE_TENANTS": "true"})
    for pool in ("prefill", "decode"):
        cluster.worker(pool, f"{pool}-0")
    cluster.wait_ready()
    cluster.wait_workers(2)
    prompt = [(13 * i) % 200 + 20 for i in range(200)]
    with cluster.client() as client:

        def cached(tenant: str, salt: str = "") -> int:
            options = {"max_tokens": 2, "ignore_eos": True, "tenant": tenant, "cache_salt": salt}
            return client.generate(prompt, **options).usage.cached_tokens

        assert cached("a") == 0
        assert cached("a") >= 192
        assert cached("b") == 0
        assert cached("") == 0
        assert cached("a", "salted") == 0
        assert cached("b") >= 192
    cluster.assert_baseline()


def test_prefill_worker_killed_before_the_first_token_is_retried_elsewhere(
    deploy: Callable[..., Cluster], oracle: Oracle
) -> None:
    cluster = deploy(1, 1, router={"probe_timeout": "0"})  # or the slow worker would not be used
    # the first worker stalls in the transfer of its first rows; it is killed there and another takes over
    cluster.worker("prefill", "prefill-slow", faults=Faults(delay_ms=60_000))
    cluster.wait_ready("prefill-slow")
    cluster.processes["prefill-0"].stop()
    cluster.wait_workers(2)
    with cluster.client(timeout_s=60) as client, ThreadPoolExecutor(1) as threads:
        future = threads.submit(client.generate, PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        slow = cluster.processes["prefill-slow"]
        wait_until(lambda: slow.metric("twinpool_prefill_requests_total"), "the slow worker has the request")
        cluster.worker("prefill", "prefill-new")
        cluster.wait_ready("prefill-new")
        cluster.wait_workers(3)
        slow.kill()
        answer = future.result(timeout=50)
    assert answer.token_ids == oracle.answer(PROMPT, 20, ignore_eos=True)
    assert answer.timeline.attempts > 1
    assert answer.timeline.prefill_worker == "prefill-new"
    cluster.assert_baseline()


def test_prefill_worker_whose_calls_fail_holds_no_decode_rows_and_is_replaced(
    deploy: Callable[..., Cluster], oracle: Oracle
) -> None:  # R1
    cluster = deploy(0, 1, router={"probe_timeout": "0"})
    cluster.worker("prefill", "prefill-bad", faults=Faults(fail_fraction=1.0))
    cluster.wait_ready("prefill-bad")
    cluster.wait_workers(2)
    with cluster.client(retries=0, timeout_s=30) as client:
        for _ in range(5):
            with pytest.raises(errors.Unavailable):
                client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
            cluster.assert_baseline()
        cluster.worker("prefill", "prefill-good")
        cluster.wait_ready("prefill-good")
        wait_until(lambda: any(w.worker_id == "prefill-good" for w in client.pools().workers), "the good one joins")
    with cluster.client(retries=5, timeout_s=60) as client:
        answer = client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        assert answer.token_ids == oracle.answer(PROMPT, 20, ignore_eos=True)
    cluster.assert_baseline()


def test_prefill_worker_whose_calls_failed_five_times_heals_by_itself(
    deploy: Callable[..., Cluster], oracle: Oracle, transport: str
) -> None:  # R1
    cluster = deploy(0, 1, router={"probe_timeout": "0", "max_attempts": "1"}, kv_transport=transport)
    cluster.worker("prefill", "prefill-0", faults=Faults(fail_first=5), kv_transport=transport)
    cluster.wait_ready("prefill-0")
    cluster.wait_workers(2)
    prefill = cluster.processes["prefill-0"]
    with cluster.client(retries=0, timeout_s=30) as client:
        failed = 0
        while prefill.metric("twinpool_prefill_transfer_failures_total") < 5:
            failed += 1
            assert failed < 60
            with pytest.raises(errors.Unavailable):
                client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
            cluster.assert_baseline()
        answer = wait_until(lambda: _answer(client), "it is trusted again")
        assert answer.token_ids == oracle.answer(PROMPT, 20, ignore_eos=True)
        assert answer.timeline.prefill_worker == "prefill-0"
        assert answer.timeline.mode == "split"
    cluster.assert_baseline()


def _answer(client: Client) -> Any:
    try:
        return client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    except errors.Unavailable:
        return None


def test_prefill_worker_that_dies_with_nobody_to_take_over_is_known_at_once(
    deploy: Callable[..., Cluster],
) -> None:  # R2
    cluster = deploy(0, 1, router={"probe_timeout": "0", "when_pool_empty": "fail"})
    cluster.worker("prefill", "prefill-slow", faults=Faults(delay_ms=60_000))
    cluster.wait_ready("prefill-slow")
    cluster.wait_workers(2)
    with cluster.client(retries=0, timeout_s=60) as client, ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.generate, PROMPT, max_tokens=20)
        slow = cluster.processes["prefill-slow"]
        wait_until(lambda: slow.metric("twinpool_prefill_requests_total"), "the worker has the request")
        slow.kill()
        with pytest.raises(errors.Unavailable):
            call.result(timeout=10)
        cluster.assert_baseline()


@pytest.mark.parametrize("fault", [Faults(corrupt_every=2), Faults(break_after_rows=3)])
def test_broken_transfer_is_never_decoded(deploy: Callable[..., Cluster], oracle: Oracle, fault: Faults) -> None:
    cluster = deploy(0, 1, router={"probe_timeout": "0"})  # else it is found out before any request
    cluster.worker("prefill", "prefill-bad", faults=fault)
    cluster.wait_ready("prefill-bad")
    cluster.wait_workers(2)
    with cluster.client(retries=0, timeout_s=30) as client:
        # alone, the faulty worker can only fail, with a typed error
        with pytest.raises(errors.Unavailable):
            client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        cluster.assert_baseline()
        cluster.worker("prefill", "prefill-good")
        cluster.wait_ready("prefill-good")
    with cluster.client(retries=5, timeout_s=60) as client:  # the one decode worker may have to be left alone a moment
        for _ in range(3):
            cluster.wait_workers(2 + 1)
            answer = client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
            assert answer.token_ids == oracle.answer(PROMPT, 20, ignore_eos=True)
    cluster.assert_baseline()


def test_decode_worker_killed_mid_answer_resumes_without_gap_or_repeat(
    deploy: Callable[..., Cluster], oracle: Oracle
) -> None:  # R3
    cluster = deploy(1, 2)
    with cluster.client(timeout_s=60) as client:
        with client.stream(PROMPT, max_tokens=LONG, temperature=0, ignore_eos=True) as stream:
            chunks = iter(stream)
            tokens = list(next(chunks).token_ids)
            while len(tokens) < 20:
                tokens += next(chunks).token_ids
            busy = [n for n in ("decode-0", "decode-1") if cluster.processes[n].metric("twinpool_decode_running")]
            assert len(busy) == 1
            cluster.processes[busy[0]].kill()
            for chunk in chunks:
                tokens += chunk.token_ids
            timeline = stream.timeline
        assert tokens == oracle.answer(PROMPT, LONG, ignore_eos=True)
        assert timeline.attempts == 2
        assert timeline.decode_worker not in busy
        for _ in range(20):  # the dead one is avoided from now on
            assert client.generate(PROMPT, max_tokens=3).timeline.decode_worker not in busy
    cluster.assert_baseline()


def test_decode_worker_killed_with_nobody_left_is_an_error_not_a_clean_end(
    deploy: Callable[..., Cluster],
) -> None:  # R3
    cluster = deploy(1, 1, router={"when_pool_empty": "fail"})
    with cluster.client(retries=0, timeout_s=30) as client:
        with client.stream(PROMPT, max_tokens=LONG, temperature=0, ignore_eos=True) as stream:
            for _ in range(5):
                next(stream)
            cluster.processes["decode-0"].kill()
            with pytest.raises(errors.Unavailable):
                stream.read()
    cluster.assert_baseline()


def test_router_killed_ends_its_requests_and_the_sdk_goes_to_the_next(deploy: Callable[..., Cluster]) -> None:
    cluster = deploy(0, 0)
    second = cluster.router("router-2")
    for pool in ("prefill", "decode"):
        cluster.worker(pool, f"{pool}-0")
    cluster.wait_ready()
    cluster.wait_workers(2)
    cluster.wait_workers(2, "router-2")
    first = cluster.processes["router"]
    with Client([first.address, second.address], timeout_s=30) as client:
        with client.stream(PROMPT, max_tokens=LONG, ignore_eos=True) as stream:
            for _ in range(5):
                next(stream)
            first.kill()
            with pytest.raises(errors.Unavailable):
                stream.read()
        assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5
    cluster.assert_baseline("router-2")


def test_empty_pool_is_named(deploy: Callable[..., Cluster]) -> None:
    cluster = deploy(1, 0, router={"when_pool_empty": "fail"})
    with cluster.client(retries=0, timeout_s=30) as client, pytest.raises(errors.PoolEmpty, match="decode"):
        client.generate(PROMPT, max_tokens=5)
    cluster.assert_baseline()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_draining_worker_finishes_what_it_has_and_exits(
    deploy: Callable[..., Cluster], oracle: Oracle, pool: str
) -> None:
    cluster = deploy(1, 1)
    with cluster.client(timeout_s=60) as client, ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(client.generate, PROMPT, max_tokens=LONG, temperature=0, ignore_eos=True) for _ in range(4)
        ]
        wait_until(lambda: cluster.processes["decode-0"].metric("twinpool_decode_running") == 4, "all four decode")
        cluster.worker(pool, f"{pool}-1")
        cluster.wait_ready(f"{pool}-1")
        assert cluster.processes[f"{pool}-0"].stop(30) == 0
        expected = oracle.answer(PROMPT, LONG, ignore_eos=True)
        assert [future.result().token_ids for future in futures] == [expected] * 4
        assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5
    cluster.assert_baseline()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_drain_command_lets_a_worker_finish_and_exit(deploy: Callable[..., Cluster], oracle: Oracle, pool: str) -> None:
    cluster = deploy(1, 1)
    cluster.worker(pool, f"{pool}-1")
    cluster.wait_ready(f"{pool}-1")
    cluster.wait_workers(3)
    router = cluster.processes["router"].address
    drain = [sys.executable, "-m", "twinpool", "drain", "--router", router]
    with cluster.client(timeout_s=60) as client, ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(client.generate, PROMPT, max_tokens=LONG, temperature=0, ignore_eos=True) for _ in range(4)
        ]
        wait_until(lambda: client.pools().running == 4, "all four run")
        told = subprocess.run([*drain, f"{pool}-0", "--wait", "40"], capture_output=True, text=True, timeout=60)
        assert (told.returncode, told.stdout.strip()) == (0, f"{pool}-0 has left"), told.stderr
        expected = oracle.answer(PROMPT, LONG, ignore_eos=True)
        assert [future.result().token_ids for future in futures] == [expected] * 4
        assert cluster.processes[f"{pool}-0"].popen.wait(20) == 0
        assert [future.result().timeline.attempts for future in futures] == [1] * 4
        assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5
        unknown = subprocess.run([*drain, "nobody"], capture_output=True, text=True, timeout=60)
        assert unknown.returncode == 1
        assert "no worker 'nobody' is connected to this router" in unknown.stderr
    cluster.assert_baseline()


def test_worker_killed_and_restarted_on_its_address_is_used_again(deploy: Callable[..., Cluster]) -> None:
    cluster = deploy(1, 1)
    port = cluster.processes["prefill-0"].address.rpartition(":")[2]
    with cluster.client(timeout_s=30) as client:
        client.generate(PROMPT, max_tokens=3)
        cluster.processes["prefill-0"].kill()
        time.sleep(0.2)
        cluster.worker("prefill", "prefill-0", port=port)
        cluster.wait_ready("prefill-0")
        wait_until(lambda: sum(w.state == "ready" for w in client.pools().workers) == 2, "both ready again")
        assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5
    cluster.assert_baseline()


def test_peers_with_other_cache_layouts_are_never_paired(deploy: Callable[..., Cluster]) -> None:  # R4, R8
    cluster = deploy(1, 0, router={"when_pool_empty": "fail"})
    cluster.worker("decode", "decode-bf16", kv_dtype="bf16")
    cluster.wait_ready("decode-bf16")
    with cluster.client(retries=0, timeout_s=30) as client:
        differ = "differ in model, cache layout or version"
        wait_until(  # before any request
            lambda: [differ in worker.reason for worker in client.pools().workers] == [True, True], "both say why"
        )
        assert all(worker.state == "joining" for worker in client.pools().workers)
        with pytest.raises(errors.PoolEmpty, match=differ):
            client.generate(PROMPT, max_tokens=5)
        cluster.worker("decode", "decode-32", block_size="32")  # mapped on the way
        cluster.wait_ready("decode-32")
        wait_until(lambda: len(client.pools().workers) == 3, "three joined")
        assert client.generate(PROMPT, max_tokens=5).timeline.decode_worker == "decode-32"
    cluster.assert_baseline()
