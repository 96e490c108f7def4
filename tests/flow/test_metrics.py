"""What the metrics of real processes say about a transfer that goes well, one that breaks, and peers that freeze."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes import Faults
from tests.flow.cluster import Cluster, Process, wait_until
from tests.flow.oracle import Oracle

PROMPT = list(range(30, 120))
ROWS = 3 * 6  # of its transfer: layers, and blocks of 16 tokens
NEVER = Faults(drop="Commit")  # all rows arrive, and heartbeats, but no transfer ends
LEASE = "1.0"


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


def freeze(process: Process) -> None:
    process.popen.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.popen.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"{process.name} is frozen")


def thaw(process: Process) -> None:
    process.popen.send_signal(signal.SIGCONT)


def test_a_transfer_and_a_broken_one_in_the_figures_of_all_three(
    with_prefill: Callable[..., Cluster], transport: str
) -> None:  # S2, S3
    cluster = with_prefill(Faults(delay_ms=200, break_after_rows=ROWS + 1))  # on every link
    router, prefill, decode = (cluster.processes[name] for name in ("router", "prefill-0", "decode-0"))
    there = {"transport": transport, "peer": "decode-0"}
    here = {"transport": transport, "peer": "prefill-0"}
    with cluster.client(timeout_s=30) as client:
        line = client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True).timeline
        for worker, pool, labels in ((prefill, "prefill", there), (decode, "decode", here)):
            assert worker.metric(f"twinpool_{pool}_transfer_bytes_total", **labels) == line.transfer_bytes
            assert worker.metric(f"twinpool_{pool}_transfer_rows_total", **labels) == ROWS
            assert worker.metric(f"twinpool_{pool}_transfer_seconds_count", **labels) == 1
            assert worker.metric(f"twinpool_{pool}_links_open", **labels) == 1
            assert worker.metric(f"twinpool_{pool}_transfers_open", **labels) == 0
            assert worker.metric(f"twinpool_{pool}_transfer_failures_total") == 0
        # The metrics are the timeline, and the timeline accounts for the latency (test_answers.py).
        for milliseconds, process, metric in (
            (line.prefill_queue_ms, prefill, "prefill_queue_seconds"),
            (line.prefill_ms, prefill, "prefill_prefill_seconds"),
            (line.transfer_ms, prefill, "prefill_transfer_seconds"),
            (line.transfer_wait_ms, prefill, "prefill_transfer_wait_seconds"),
            (line.decode_ms, decode, "decode_request_seconds"),
        ):
            assert 1000 * process.metric(f"twinpool_{metric}_sum") == pytest.approx(milliseconds, abs=0.1), metric
        ttft_ms = 1000 * router.metric("twinpool_router_ttft_seconds_sum")  # read a moment later
        assert ttft_ms == pytest.approx(line.ttft_ms, abs=20)
        assert line.transfer_wait_ms >= 200  # what was injected is there, and in the time to the second token
        share = line.transfer_wait_ms / (line.ttft_ms + line.transfer_wait_ms)
        assert router.metric("twinpool_router_transfer_wait_share_count") == 1
        assert router.metric("twinpool_router_transfer_wait_share_sum") == pytest.approx(share, abs=1e-3)

        assert client.generate(PROMPT[::-1], max_tokens=8, temperature=0, ignore_eos=True).timeline.attempts == 2
    assert router.metric("twinpool_router_transfer_retries_total", error="PeerLost") == 1
    assert router.metric("twinpool_router_transfer_wait_share_count") == 1  # waits of two attempts are none of TTFT
    assert prefill.metric("twinpool_prefill_transfer_failures_total", error="PeerLost", **there) == 1
    assert prefill.metric("twinpool_prefill_link_reconnects_total", **there) == 1
    for worker, pool, labels in ((prefill, "prefill", there), (decode, "decode", here)):
        assert worker.metric(f"twinpool_{pool}_transfer_retries_total", **labels) == 1
        assert worker.metric(f"twinpool_{pool}_transfer_seconds_count", **labels) == 2
        assert worker.metric(f"twinpool_{pool}_transfers_open", **labels) == 0
    cluster.assert_baseline()


def test_prefill_worker_frozen_in_a_transfer_is_replaced_within_the_lease(
    with_prefill: Callable[..., Cluster], oracle: Oracle, transport: str
) -> None:  # L6
    cluster = with_prefill(NEVER, kv_lease=LEASE)
    prefill, decode = cluster.processes["prefill-0"], cluster.processes["decode-0"]
    with ThreadPoolExecutor(1) as threads, cluster.client(timeout_s=60) as client:
        answer = threads.submit(client.generate, PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
        wait_until(lambda: decode.metric("twinpool_decode_transfer_rows_total") == ROWS, "the rows have arrived")
        cluster.worker("prefill", "prefill-1", kv_transport=transport, kv_lease=LEASE)
        cluster.wait_ready("prefill-1")
        cluster.wait_workers(3)
        freeze(prefill)
        assert list(answer.result(60).token_ids) == oracle.answer(PROMPT, 8, ignore_eos=True)
    lost = {"transport": transport, "peer": "prefill-0"}
    assert decode.metric("twinpool_decode_lost_leases_total", **lost) == 1
    assert decode.metric("twinpool_decode_transfer_failures_total", error="PeerLost", **lost) == 1
    # Over tcp the decode worker does the writing. In shared memory the frozen one may still, when it thaws.
    held = 6 if transport == "shm" else 0
    assert decode.metric("twinpool_decode_quarantined_rows", **lost) == held
    wait_until(lambda: decode.metric("twinpool_decode_rows_used") >= held, "the rows that are held count as used")
    thaw(prefill)
    wait_until(lambda: not decode.metric("twinpool_decode_quarantined_rows"), "the end of the quarantine")
    cluster.assert_baseline()


def test_decode_worker_frozen_in_a_transfer_frees_the_prefill_side_within_the_lease(
    with_prefill: Callable[..., Cluster], oracle: Oracle, transport: str
) -> None:  # L3
    cluster = with_prefill(NEVER, kv_lease=LEASE)
    prefill, decode = cluster.processes["prefill-0"], cluster.processes["decode-0"]
    with ThreadPoolExecutor(1) as threads, cluster.client(timeout_s=60) as client:
        answer = threads.submit(client.generate, PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
        wait_until(lambda: decode.metric("twinpool_decode_transfer_rows_total") == ROWS, "the rows have arrived")
        for pool in ("prefill", "decode"):
            cluster.worker(pool, f"{pool}-1", kv_transport=transport, kv_lease=LEASE)
        cluster.wait_ready("prefill-1", "decode-1")
        cluster.wait_workers(4)
        freeze(decode)
        lost = {"transport": transport, "peer": "decode-0"}
        wait_until(lambda: prefill.metric("twinpool_prefill_lost_leases_total", **lost) == 1, "the lease is lost")
        wait_until(lambda: not prefill.metric("twinpool_prefill_rows_used"), "the prefill worker's rows are free")
        assert prefill.metric("twinpool_prefill_transfer_failures_total", error="PeerLost", **lost) == 1
        assert list(answer.result(60).token_ids) == oracle.answer(PROMPT, 8, ignore_eos=True)
    thaw(decode)
    wait_until(lambda: not decode.metric("twinpool_decode_reservations"), "what it held is free")
    cluster.assert_baseline()
