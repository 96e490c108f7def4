"""Transfers that are late, broken, given up or orphaned, between real processes and on every transport."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes import Faults
from tests.flow.cluster import Cluster, open_cluster, wait_until
from tests.flow.conftest import TRANSPORTS
from tests.flow.oracle import Oracle
from twinpool import errors
from twinpool.client import Client

PROMPT = list(range(30, 120))
NEVER = Faults(delay_ms=60_000, delay_from_region=1)  # the first layer arrives, the others do not


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture(scope="module", params=TRANSPORTS)
def lossy_deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Cluster]:
    """Every transfer is late, and a tenth of them fails."""
    folder, router = tmp_path_factory.mktemp("lossy"), {"probe_timeout": "0"}
    for cluster in open_cluster(folder, tiny_model, 0, 1, router=router, kv_transport=request.param):
        faults = Faults(delay_ms=5, fail_fraction=0.1, seed=5)
        cluster.worker("prefill", "prefill-0", faults=faults, kv_transport=request.param)
        cluster.wait_ready("prefill-0")
        cluster.wait_workers(2)
        yield cluster


@pytest.fixture
def lossy(lossy_deployment: Cluster) -> Iterator[Cluster]:
    yield lossy_deployment
    lossy_deployment.assert_baseline()


def ask(client: Client, prompt: list[int], max_tokens: int) -> list[int]:
    return list(client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True).token_ids)


def ask_the_lossy(client: Client, prompt: list[int], max_tokens: int) -> list[int]:
    """Again and again: its transfer may be among those that fail, and a worker with failures gets a pause."""

    def answer() -> list[int]:
        try:
            return ask(client, prompt, max_tokens)
        except errors.Unavailable:
            return []

    return list(wait_until(answer, "an answer"))


def begin_transfer(client: Client, prompt: list[int], **options: object) -> contextlib.AbstractContextManager[object]:
    """A stream whose first token has come from the prefill worker, while its rows have not arrived."""
    stream = client.stream(prompt, max_tokens=30, temperature=0, ignore_eos=True, **options)
    next(iter(stream))
    return stream


def test_late_rows_of_a_request_that_is_over_do_not_reach_the_next_one(
    deploy: Callable[..., Cluster], oracle: Oracle, transport: str
) -> None:  # L1, L4, L5
    cluster = deploy(0, 0, router={"probe_timeout": "0"})
    second = cluster.router("router-2", probe_timeout="0")
    first = cluster.processes["router"]
    small = {"kv_transport": transport, "memory": "30KiB"}  # 8 rows of 3 layers: one prompt's, not two's
    decode = cluster.worker("decode", "decode-0", routers=f"{first.address},{second.address}", **small)
    late = Faults(delay_ms=500, delay_from_region=1)
    cluster.worker("prefill", "prefill-late", faults=late, routers=first.address, kv_transport=transport)
    cluster.worker("prefill", "prefill-prompt", routers=second.address, kv_transport=transport)
    cluster.wait_ready()
    cluster.wait_workers(2)
    cluster.wait_workers(2, "router-2")
    expected = oracle.answer(PROMPT[1:], 20, ignore_eos=True)
    with cluster.client(retries=0, timeout_s=30) as client, cluster.client("router-2", timeout_s=30) as other:

        def cancelled() -> float:
            """Rows that were refused, once the sender has heard of the cancel too late, as it mostly does."""
            with begin_transfer(client, PROMPT):
                pass
            assert ask(other, PROMPT[1:], 20) == expected
            return decode.metric("twinpool_decode_transfer_refusals_total", error="ReservationGone")

        refused = wait_until(cancelled, "the late rows of a cancelled request come")
        with pytest.raises((errors.DeadlineExceeded, errors.Unavailable)):
            client.generate(PROMPT, max_tokens=20, deadline_s=0.3)  # the reservation expires with it
        assert ask(other, PROMPT[1:], 20) == expected
        wait_until(
            lambda: decode.metric("twinpool_decode_transfer_refusals_total", error="ReservationGone") > refused,
            "the late rows of the expired request come",
        )
        assert ask(other, PROMPT[1:], 20) == expected
    cluster.assert_baseline()
    cluster.assert_baseline("router-2")


def test_decode_worker_killed_after_prefill_frees_the_prefill_worker(
    with_prefill: Callable[..., Cluster], oracle: Oracle, transport: str
) -> None:  # L3
    cluster = with_prefill(NEVER)
    prefill = cluster.processes["prefill-0"]
    with cluster.client(retries=0, timeout_s=30) as client:
        with begin_transfer(client, PROMPT) as stream:
            assert prefill.metric("twinpool_prefill_rows_used") > 0
            cluster.processes["decode-0"].kill()
            wait_until(lambda: not prefill.metric("twinpool_prefill_rows_used"), "the prefill worker's rows are free")
            with pytest.raises(errors.TwinpoolError):
                stream.read()  # type: ignore[attr-defined]
    cluster.assert_baseline()


def test_prefill_worker_killed_in_the_transfer_and_restarted_on_its_address(
    with_prefill: Callable[..., Cluster], oracle: Oracle, transport: str
) -> None:  # L6, L15
    cluster = with_prefill(NEVER)
    prefill, decode = cluster.processes["prefill-0"], cluster.processes["decode-0"]
    with cluster.client(retries=0, timeout_s=30) as client:
        with begin_transfer(client, PROMPT):
            assert decode.metric("twinpool_decode_reservations") == 1
            prefill.kill()
        cluster.assert_baseline()  # the client is gone, the prefill worker is dead, and the decode worker has its rows
        cluster.worker("prefill", "prefill-0", kv_transport=transport, port=prefill.address.rpartition(":")[2])
        cluster.wait_ready("prefill-0")
        cluster.wait_workers(2)
        assert cluster.processes["prefill-0"].address == prefill.address
        assert ask(client, PROMPT, 20) == oracle.answer(PROMPT, 20, ignore_eos=True)
    cluster.assert_baseline()


@pytest.mark.parametrize("faults", [Faults(drop="Commit"), Faults(kill_after_rows=7)])
def test_a_transfer_that_never_ends_ends_its_request_by_the_deadline(
    with_prefill: Callable[..., Cluster], faults: Faults
) -> None:  # L7
    cluster = with_prefill(faults)
    with cluster.client(retries=0, timeout_s=30) as client:
        with pytest.raises((errors.DeadlineExceeded, errors.Unavailable)):
            client.generate(PROMPT, max_tokens=20, deadline_s=2)
        cluster.assert_baseline()


def test_eight_requests_where_three_fit_wait_for_leases_and_are_all_answered(
    deploy: Callable[..., Cluster], oracle: Oracle, tmp_path: Path, tiny_model: Path, transport: str
) -> None:  # L3, L12
    cluster = Cluster(tmp_path, tiny_model)
    try:
        cluster.router(lease_ms="400", heartbeat_ms="100")
        cluster.worker("prefill", "prefill-0", kv_transport=transport)
        cluster.worker("decode", "decode-0", kv_transport=transport, memory="110KiB")  # 32 rows; 10 for each request
        cluster.wait_ready()
        cluster.wait_workers(2)
        prompts = [[20 + i, *PROMPT] for i in range(8)]
        with cluster.client(retries=0, timeout_s=60) as client, ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda prompt: ask(client, prompt, 60), prompts))
        assert answers == [oracle.answer(prompt, 60, ignore_eos=True) for prompt in prompts]
        cluster.assert_baseline()
    finally:
        cluster.close()


def test_a_hundred_cancels_at_random_moments_of_the_transfer(lossy: Cluster, oracle: Oracle) -> None:  # L9
    draw = random.Random(23)
    plans = [
        (draw.randrange(0, 4), [draw.randrange(10, 250) for _ in range(draw.randrange(3, 200))]) for _ in range(100)
    ]

    def ask_and_leave(plan: tuple[int, list[int]]) -> None:
        after, prompt = plan
        with contextlib.suppress(errors.Unavailable, errors.Overloaded):
            with client.stream(prompt, max_tokens=30, ignore_eos=True) as stream:
                for number, _ in enumerate(stream):
                    if number == after:
                        return

    with lossy.client(timeout_s=60) as client, ThreadPoolExecutor(12) as threads:
        list(threads.map(ask_and_leave, plans))
        lossy.assert_baseline()
        assert ask_the_lossy(client, PROMPT, 20) == oracle.answer(PROMPT, 20, ignore_eos=True)


def test_a_probe_among_five_hundred_mixed_requests_never_changes(lossy: Cluster, oracle: Oracle) -> None:  # C3, C4
    draw = random.Random(29)
    expected = oracle.answer(PROMPT, 12, ignore_eos=True)

    def one(number: int) -> list[int] | None:
        if number % 50 == 0:
            prompt, options = PROMPT, {"temperature": 0, "max_tokens": 12}
        else:
            prompt = [draw.randrange(10, 250) for _ in range(draw.randrange(1, 60))]
            options = {
                "temperature": draw.choice([0, 0.8]),
                "max_tokens": draw.randrange(1, 6),
                "n": draw.choice([1, 2]),
            }
        try:
            return list(client.generate(prompt, ignore_eos=True, **options).token_ids)
        except (errors.Unavailable, errors.Overloaded):  # a tenth of the transfers fails
            return None

    with lossy.client(timeout_s=60, retries=4) as client, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(one, range(500)))
        probes = [answers[number] for number in range(0, 500, 50)]
        assert any(probes)
        assert [probe for probe in probes if probe is not None and probe != expected] == []
        assert lossy.processes["decode-0"].metric("twinpool_decode_transfer_failures_total") > 0
        assert ask_the_lossy(client, PROMPT, 12) == expected


@pytest.mark.parametrize("kv_transport", TRANSPORTS)
def test_200_distinct_prompts_at_once_each_equal_their_solo_run(
    deploy: Callable[..., Cluster], oracle: Oracle, kv_transport: str
) -> None:  # C2
    draw = random.Random(31)
    prompts = [[draw.randrange(10, 250) for _ in range(draw.randrange(3, 60))] for _ in range(200)]
    cluster = deploy(1, 1, kv_transport=kv_transport)
    with cluster.client(timeout_s=100) as client, ThreadPoolExecutor(200) as threads:
        answers = list(threads.map(lambda prompt: ask(client, prompt, 5), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == oracle.answer(prompt, 5, ignore_eos=True)
    cluster.assert_baseline()


def test_a_slow_transfer_shows_in_its_own_figures_of_the_timeline(with_prefill: Callable[..., Cluster]) -> None:  # S3
    cluster = with_prefill(Faults(delay_ms=200))
    with cluster.client(timeout_s=30) as client:
        line = client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True).timeline
        assert line.transfer_wait_ms >= 200
        assert line.total_ms - line.ttft_ms >= 200 - 20  # the first token took a moment to the client
        before_ms = line.queued_ms + line.reserve_ms + line.prefill_queue_ms + line.prefill_ms
        assert before_ms + line.transfer_wait_ms + line.decode_ms <= line.total_ms + 20
        prefill = cluster.processes["prefill-0"]
        assert prefill.metric("twinpool_prefill_transfer_wait_seconds_sum") >= 0.2
    cluster.assert_baseline()


def test_decode_workers_with_other_rows_join_and_only_pairs_that_fit_are_made(
    deploy: Callable[..., Cluster], oracle: Oracle, transport: str
) -> None:  # C9
    cluster = deploy(1, 1, kv_transport=transport)
    cluster.worker("decode", "decode-blocks-of-32", kv_transport=transport, block_size="32")
    cluster.worker("decode", "decode-bf16", kv_transport=transport, kv_dtype="bf16")
    cluster.wait_ready("decode-blocks-of-32", "decode-bf16")
    cluster.wait_workers(3)
    cluster.wait_workers(1, states=("joining",))
    used = set()
    with cluster.client(retries=0, timeout_s=60) as client, ThreadPoolExecutor(4) as threads:
        requests = [
            threads.submit(client.generate, [number, *PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
            for number in range(40)
        ]
        reasons = {worker.worker_id: worker.reason for worker in client.pools().workers}
        assert "no prefill worker fits it" in reasons["decode-bf16"]
        for number, request in enumerate(requests):
            answer = request.result(timeout=60)
            assert answer.token_ids == oracle.answer([number, *PROMPT], 20, ignore_eos=True)
            used.add(answer.timeline.decode_worker)
    assert used == {"decode-0", "decode-blocks-of-32"}
    assert all(process.popen.poll() is None for process in cluster.processes.values())
    assert not cluster.processes["decode-bf16"].metric("twinpool_decode_requests_total", sla_class="interactive")
    cluster.assert_baseline()
