"""Both workers while a transfer is late, broken or forged, on every transport: the text is right or there is none."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from decode.request import Reason, Reserved, Token
from engine.engine import Engine
from kvtransfer.target import Target
from prefill.request import Finished, FirstTokens, Transferred
from prefill.request import Request as PrefillRequest
from tests.decode.pair import TIMEOUT_S, Call, Pair, alone, greedy, open_pair
from tests.decode.test_split_pools import prompt_of
from tests.fakes import Faults
from twinpool.errors import ChecksumMismatch, ReservationGone, TransferFailed, TransferTimeout

EngineFactory = Callable[..., Engine]
LAST_LAYER = 2
NUM_LAYERS = 3


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prefill_only(pair: Pair, call: Call, target: bytes, prompt: Sequence[int]) -> Finished:
    """What the prefill worker ends with when it is told to push `prompt`, for `call`, to `target`."""
    events: queue.Queue[Any] = queue.Queue()
    request = PrefillRequest(
        request_id=call.request_id,
        attempt=call.attempt,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=call.params,
        input_class="short",
        target=target,
        timeout_s=TIMEOUT_S,
    )
    pair.prefill.submit(request, events.put)
    while not isinstance(event := events.get(timeout=TIMEOUT_S), Finished):
        pass
    return event


def reserved(pair: Pair, prompt: Sequence[int], **options: Any) -> tuple[Call, bytes]:
    """A request for which the decode worker has set rows aside, and the target that it gave out; no prefill begins."""
    call = pair.call(prompt, greedy(12), **options)
    event = call.events.get(timeout=TIMEOUT_S)
    assert isinstance(event, Reserved)
    return call, event.target


def times_of_steps(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[float]:
    """When each step of the engine begins, from now on."""
    begun: list[float] = []

    def timed(step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begun.append(time.monotonic())
        return step(*args, **options)

    for name in ("forward", "decode"):
        monkeypatch.setattr(engine, name, partial(timed, getattr(engine, name)))
    return begun


@pytest.mark.parametrize("end", ["expiry", "cancel"])
def test_a_late_writer_does_not_reach_the_rows_that_another_request_got(
    engine: EngineFactory, oracle: Engine, transport: str, end: str
) -> None:  # L4, L5
    late = Faults(delay_ms=500, delay_from_region=1)  # the sender knows where to write, and does so late
    with open_pair(engine(), engine(rows=8), faults=late, transport=transport) as pair:
        for _ in range(5):  # on a busy machine the sender may hear of the end before it has begun to write
            first = pair.call(prompt_of(100), greedy(10), timeout_s=0.2 if end == "expiry" else 20)
            first.wait_for(FirstTokens)
            if end == "cancel":
                first.cancel()
            first.wait()
            assert first.ended is not None
            if end == "expiry":
                assert isinstance(first.ended.error, TransferTimeout)
            second = pair.call(prompt_of(101), greedy(10)).wait()  # 7 of 8 rows each
            assert second.token_ids() == alone(oracle, prompt_of(101), greedy(10))
            assert len(first.outputs[0]) == 1
            if pair.sample("twinpool_decode_transfer_refusals_total", error="ReservationGone") > 0:
                return
    pytest.fail("no row was ever late")


def test_rows_of_a_late_last_layer_are_not_reused_before_the_acknowledgement(
    engine: EngineFactory, oracle: Engine, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # L11
    late = Faults(delay_ms=1000, delay_from_region=LAST_LAYER)
    with open_pair(engine(rows=8), engine(), faults=late, transport=transport) as pair:
        steps = times_of_steps(monkeypatch, pair.prefill_engine)
        calls = [pair.call(prompt_of(length), greedy(10)) for length in (100, 101)]  # 7 of 8 rows each
        for call in calls:
            call.wait_for(FirstTokens)
        for call in calls:
            call.wait()
            assert call.token_ids() == alone(oracle, call.prompt, greedy(10))
        first, second = calls if calls[0].prefill.sampled_at < calls[1].prefill.sampled_at else calls[::-1]
        assert len(steps) == 2
        assert steps[1] >= first.prefill.push._result.done_at
        assert second.transferred is not None


def test_decode_never_starts_before_the_rows_are_readable(
    engine: EngineFactory, oracle: Engine, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # L14
    with open_pair(engine(), engine(), faults=Faults(delay_ms=1000), transport=transport) as pair:
        steps = times_of_steps(monkeypatch, pair.decode_engine)
        call = pair.call(prompt_of(60), greedy(10)).wait()
        assert call.token_ids() == alone(oracle, prompt_of(60), greedy(10))
        assert call.prefill is not None
        assert steps[0] >= call.prefill.sampled_at + 1.0


@pytest.mark.parametrize(
    "faults",
    [
        Faults(drop="Put", drop_every=4),
        Faults(duplicate_every=3),
        Faults(reorder_every=NUM_LAYERS),
        Faults(mangle_every=2, seed=1),
        Faults(fail_fraction=1.0),
    ],
)
def test_lost_repeated_swapped_or_mangled_frames_are_never_decoded(
    engine: EngineFactory, transport: str, faults: Faults
) -> None:  # C2
    with open_pair(engine(), engine(), faults=faults, transport=transport) as pair:
        prompt = prompt_of(200)
        calls = [pair.call(prompt, greedy(20), attempt=attempt, request_id=f"r{attempt}").wait() for attempt in (1, 2)]
        broken = [call for call in calls if call.prefill_end is not None and call.prefill_end.error is not None]
        assert broken
        for call in broken:
            assert call.ended is not None
            # whichever side saw it first says what it was; the router cancels the other
            assert any(isinstance(end.error, TransferFailed) for end in (call.ended, call.prefill_end))
            assert len(call.outputs.get(0, [])) <= 1  # the first token comes from prefill


@pytest.mark.parametrize("scale", ["first", "last"])
def test_one_corrupted_scale_byte_is_an_error(engine: EngineFactory, transport: str, scale: str) -> None:  # C6
    layout = engine().cache.layout
    num_scale_bytes = 2 * layout.num_kv_heads * layout.block_size * 2  # K's and V's, fp16, behind the codes
    byte = layout.row_bytes - (num_scale_bytes if scale == "first" else 1)
    faults = Faults(corrupt_every=5, corrupt_byte=byte)
    with open_pair(engine(), engine(), faults=faults, transport=transport) as pair:
        call = pair.call(prompt_of(60), greedy(20)).wait()
        assert call.ended is not None
        assert call.prefill_end is not None
        assert ChecksumMismatch in (type(call.ended.error), type(call.prefill_end.error))
        assert len(call.outputs.get(0, [])) <= 1


def test_a_reservation_that_nobody_made_is_refused(engine: EngineFactory, transport: str) -> None:  # C1
    with open_pair(engine(), engine(), transport=transport) as pair:
        call, target = reserved(pair, prompt_of(40))
        forged = replace(Target.decode(target), token=bytes(16)).encode()
        assert isinstance(prefill_only(pair, call, forged, prompt_of(40)).error, ReservationGone)
        foreign = replace(Target.decode(target), request_id="another").encode()
        assert isinstance(prefill_only(pair, call, foreign, prompt_of(40)).error, ReservationGone)
        call.cancel()
        call.wait()
        assert not call.outputs


def test_rows_beyond_the_reservation_are_refused(engine: EngineFactory, transport: str) -> None:  # C1
    with open_pair(engine(), engine(), transport=transport) as pair:
        call, target = reserved(pair, prompt_of(40))
        assert isinstance(prefill_only(pair, call, target, prompt_of(60)).error, TransferFailed)
        call.wait()
        assert call.ended is not None
        assert call.ended.reason is Reason.TRANSFER_FAILED
        assert not call.outputs


def test_fewer_rows_than_were_reserved_are_no_transfer(engine: EngineFactory, transport: str) -> None:  # C1
    with open_pair(engine(), engine(), transport=transport) as pair:
        call, target = reserved(pair, prompt_of(40))
        assert isinstance(prefill_only(pair, call, target, prompt_of(20)).error, TransferFailed)
        call.wait()
        assert call.ended is not None
        assert call.ended.reason is Reason.TRANSFER_FAILED
        assert not call.outputs


def test_a_reservation_is_used_once(engine: EngineFactory, oracle: Engine, transport: str) -> None:  # C1
    with open_pair(engine(), engine(), transport=transport) as pair:
        call, target = reserved(pair, prompt_of(40))
        assert prefill_only(pair, call, target, prompt_of(40)).error is None
        assert isinstance(prefill_only(pair, call, target, prompt_of(40)).error, ReservationGone)
        call.outputs[0] = []
        call.wait()
        assert call.token_ids() == alone(oracle, prompt_of(40), greedy(12))[1:]


def test_an_expired_reservation_is_refused(engine: EngineFactory, transport: str) -> None:  # C1
    with open_pair(engine(), engine(), transport=transport) as pair:
        call, target = reserved(pair, prompt_of(40), timeout_s=0.05)
        call.wait()
        assert call.ended is not None
        assert isinstance(call.ended.error, TransferTimeout)
        assert isinstance(prefill_only(pair, call, target, prompt_of(40)).error, ReservationGone)
        assert not call.outputs


def test_a_reservation_whose_rows_another_request_has_is_refused(
    engine: EngineFactory, oracle: Engine, transport: str
) -> None:  # C1
    with open_pair(engine(), engine(rows=8), transport=transport) as pair:
        gone, target = reserved(pair, prompt_of(100))
        gone.cancel()
        gone.wait()
        other = pair.call(prompt_of(101), greedy(12)).wait_for(Token)
        assert isinstance(prefill_only(pair, gone, target, prompt_of(100)).error, ReservationGone)
        other.wait()
        assert other.token_ids() == alone(oracle, prompt_of(101), greedy(12))
        assert not gone.outputs


def test_after_a_tenth_of_the_transfers_failed_a_probe_is_as_before(
    engine: EngineFactory, oracle: Engine, transport: str
) -> None:  # C4
    faults = Faults(fail_fraction=0.1, seed=2)
    with open_pair(engine(), engine(), faults=faults, transport=transport) as pair:
        failed = 0
        for number in range(80):
            prompt = prompt_of(20 + number % 40)
            call = pair.call(prompt, greedy(3)).wait()
            if call.prefill_end is not None and call.prefill_end.error is not None:
                failed += 1
                assert len(call.outputs[0]) <= 1
            else:
                assert call.token_ids() == alone(oracle, prompt, greedy(3))
        assert 0 < failed < 40
        pair.assert_baseline()
        while True:  # the probe itself may be one of those that fail
            call = pair.call(prompt_of(70), greedy(12)).wait()
            if call.prefill_end is not None and call.prefill_end.error is None:
                break
        assert call.token_ids() == alone(oracle, prompt_of(70), greedy(12))


def test_a_thousand_failed_transfers_leave_both_workers_flat(engine: EngineFactory, transport: str) -> None:  # L13
    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def fail(count: int) -> None:
        for number in range(count):
            call = pair.call(prompt_of(17, seed=number % 50), greedy(3)).wait()
            assert call.prefill_end is not None
            assert call.prefill_end.error is not None
        pair.assert_baseline()
        gc.collect()

    with open_pair(engine(), engine(), faults=Faults(fail_fraction=1.0), transport=transport) as pair:
        fail(100)
        flat = held()
        tracemalloc.start()
        try:
            fail(50)
            base = tracemalloc.get_traced_memory()[0]
            fail(850)
            grown = tracemalloc.get_traced_memory()[0] - base
        finally:
            tracemalloc.stop()
        assert held() == flat
        assert grown < 200_000


def test_rows_of_a_long_prompt_travel_while_it_is_computed(
    engine: EngineFactory, oracle: Engine, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # S1
    prompt = prompt_of(2000)  # of a context of 2,048
    with open_pair(engine(), engine(), transport=transport) as pair:
        compute = pair.prefill_engine.forward
        left: list[int] = []

        def forward(batch: Any, on_layer: Callable[[int], None]) -> torch.Tensor:
            def computed(layer: int) -> None:
                """What was handed over before this layer leaves now, however long this layer takes."""
                (push,) = {sequence.push for sequence in pair.prefill._open}
                assert push is not None
                end = time.monotonic() + TIMEOUT_S
                link = push._outbound
                while link._departures is None or link._departures.has_some or link._inbox:
                    assert time.monotonic() < end, "rows wait for the end of the prompt"
                    time.sleep(0.0002)
                left.append(push.num_rows)
                on_layer(layer)

            return compute(batch, computed)

        monkeypatch.setattr(pair.prefill_engine, "forward", forward)
        call = pair.call(prompt, greedy(4)).wait()
        assert call.transferred is not None
        assert call.transferred.rows == NUM_LAYERS * 125
        # of all rows only the last layer's of the last chunk are still to leave when the first token can be sampled
        assert call.transferred.rows - left[-1] <= 0.1 * call.transferred.rows
        assert call.token_ids() == alone(oracle, prompt, greedy(4))


def test_a_slow_transfer_shows_in_its_own_figures_and_in_no_others(engine: EngineFactory, transport: str) -> None:  # S3
    with open_pair(engine(), engine(), faults=Faults(delay_ms=200), transport=transport) as pair:
        call = pair.call(prompt_of(60), greedy(10)).wait_for(FirstTokens)
        first_at = time.monotonic()
        assert call.transferred is None
        call.wait_for(Token)
        assert time.monotonic() - first_at >= 0.2 - 0.05  # the event of the first token was under way, too
        call.wait()
        total_s = time.monotonic() - call.prefill.received_at  # type: ignore[union-attr]
        assert call.transferred is not None
        assert call.first is not None
        assert call.ended is not None
        assert call.transferred.transfer_wait_ms >= 200
        assert pair.sample("twinpool_prefill_transfer_wait_seconds_sum") >= 0.2
        assert pair.sample("twinpool_decode_reserved_seconds_sum") >= 0.2
        for name in ("prefill_sample", "decode_start"):  # the rest of the way from the last layer to the first step
            assert pair.sample(f"twinpool_{name}_seconds_count") == 1
            assert 0 < pair.sample(f"twinpool_{name}_seconds_sum") < total_s - 0.2
        # prefill, the wait and the decoding follow one another: none of them contains the delay a second time
        before_ms = call.first.queue_ms + call.first.prefill_ms
        assert before_ms + call.transferred.transfer_wait_ms + call.ended.decode_ms <= 1000 * total_s + 50
        assert pair.sample("twinpool_decode_itl_seconds_sum") == pytest.approx(call.ended.decode_ms / 1000)


def test_events_of_a_transfer_come_in_order(engine: EngineFactory, transport: str) -> None:  # S3
    with open_pair(engine(), engine(), faults=Faults(delay_ms=100), transport=transport) as pair:
        call = pair.call(prompt_of(60), greedy(3))
        order = []
        while call.open:
            event = call.step()
            order.append(type(event))
        assert order.index(FirstTokens) < order.index(Transferred)
        assert order.index(FirstTokens) < order.index(Token)
