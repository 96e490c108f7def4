"""Both workers when a request is cancelled, a transfer goes wrong or a step fails: typed ends, and nothing leaked."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.request import Ended, Reason, Reserved, Token
from engine.engine import Engine
from prefill.request import Finished, FirstTokens
from prefill.request import Request as PrefillRequest
from tests import tiny_models
from tests.decode.pair import TIMEOUT_S, Pair, alone, cancel_at_random, greedy, load_engine, open_pair
from tests.decode.test_split_pools import prompt_of, prompts
from tests.fakes import Faults
from twinpool.errors import (
    ChecksumMismatch,
    Incompatible,
    Internal,
    InvalidRequest,
    PeerLost,
    TransferFailed,
    TransferTimeout,
)
from twinpool.v1 import worker_pb2 as pb

EngineFactory = Callable[..., Engine]


def assert_serves(pair: Pair, oracle: Engine) -> None:
    (call,) = pair.generate([prompt_of(40)], greedy(12))
    assert call.token_ids() == alone(oracle, prompt_of(40), greedy(12))


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("moment", [Reserved, FirstTokens, Token])
def test_cancel_frees_both_sides(engine: EngineFactory, oracle: Engine, moment: type) -> None:  # L1
    with open_pair(engine(), engine()) as pair:
        call = pair.call(prompt_of(200), greedy(1000)).wait_for(moment)
        call.cancel()
        call.wait()
        assert call.ended is not None
        assert call.ended.reason is Reason.CANCELLED
        pair.assert_baseline()
        assert_serves(pair, oracle)


def test_cancel_while_rows_are_on_their_way(engine: EngineFactory) -> None:  # L1
    with open_pair(engine(), engine(), faults=Faults(delay_ms=500)) as pair:
        call = pair.call(prompt_of(100), greedy(50)).wait_for(FirstTokens)
        begin = time.monotonic()
        call.cancel()
        call.wait()
        pair.assert_baseline()
        assert time.monotonic() - begin < 5  # and not when the transfer would have timed out


def test_cancelling_again_and_again_around_the_end_is_harmless(engine: EngineFactory, oracle: Engine) -> None:  # L8
    with open_pair(engine(), engine()) as pair:
        for max_tokens in (1, 2, 3, 8):
            call = pair.call(prompt_of(20), greedy(max_tokens)).wait_for(FirstTokens)
            for _ in range(3):
                call.cancel()
            call.wait()
            for _ in range(3):
                call.cancel()
            pair.decode.cancel("never heard of", 1, None)
            assert call.num_ended == 1
        assert_serves(pair, oracle)


def test_a_hundred_cancels_at_random_moments(engine: EngineFactory, oracle: Engine) -> None:  # L9
    draw = random.Random(17)
    with open_pair(engine(rows=120), engine(rows=60), token_budget=64) as pair:
        calls = [pair.call(prompt, greedy(200)) for prompt in prompts(100, seed=9, low=1, high=200)]
        cancel_at_random(calls, draw, strays=0.02)
        assert all(call.num_ended == 1 for call in calls)
        pair.assert_baseline()
        assert_serves(pair, oracle)


def test_cancel_of_one_choice_leaves_the_others(engine: EngineFactory, oracle: Engine) -> None:
    params = greedy(30, n=3, temperature=0.7, seed=5)
    with open_pair(engine(), engine()) as pair:
        early = pair.call(prompt_of(20), params).wait_for(Reserved)
        pair.decode.cancel(early.request_id, 1, 1)
        early.wait()
        late = pair.call(prompt_of(20), params).wait_for(Token)
        pair.decode.cancel(late.request_id, 1, 0)
        pair.decode.cancel(late.request_id, 1, 0)
        late.wait()
    for call, gone in ((early, 1), (late, 0)):
        for choice in {0, 1, 2} - {gone}:
            assert call.token_ids(choice) == alone(oracle, prompt_of(20), params, choice)
        assert len(call.token_ids(gone)) < 30
        assert call.ended is not None
        assert call.ended.reason is Reason.FINISHED


@pytest.mark.parametrize(
    ("faults", "error"),
    [(Faults(corrupt_every=2), ChecksumMismatch), (Faults(break_after_rows=3), PeerLost)],
)
def test_broken_transfer_is_never_decoded(engine: EngineFactory, faults: Faults, error: type) -> None:  # C6
    with open_pair(engine(), engine(), faults=faults) as pair:
        call = pair.call(prompt_of(60), greedy(20)).wait()
        assert call.ended is not None
        assert call.prefill_end is not None
        # whichever side saw it first says what it was; the router cancels the other
        assert error in (type(call.ended.error), type(call.prefill_end.error))
        assert call.ended.reason in (Reason.TRANSFER_FAILED, Reason.CANCELLED)
        refusals = pair.sample("twinpool_decode_transfer_refusals_total", error="ChecksumMismatch")
        assert bool(refusals) == (error is ChecksumMismatch)
        assert len(call.outputs.get(0, [])) <= 1  # the first token comes from prefill


def test_rows_that_do_not_come_in_time_are_taken_back(engine: EngineFactory) -> None:
    with open_pair(engine(), engine(), faults=Faults(delay_ms=60_000)) as pair:
        call = pair.call(prompt_of(60), greedy(20), timeout_s=0.3).wait()
        assert call.ended is not None
        assert call.ended.reason is Reason.TRANSFER_FAILED
        assert type(call.ended.error) is TransferTimeout


def test_request_that_never_fits_is_rejected_with_the_numbers(engine: EngineFactory) -> None:  # L2
    with open_pair(engine(), engine(rows=4)) as pair:
        call = pair.call(prompt_of(100), greedy(5)).wait()
        assert call.ended is not None
        assert call.ended.reason is Reason.REJECTED
        assert isinstance(call.ended.error, InvalidRequest)
        assert "64" in call.ended.error.message


@pytest.mark.parametrize("side", ["prefill_engine", "decode_engine"])
def test_failing_step_ends_its_requests_only(
    engine: EngineFactory, oracle: Engine, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    with open_pair(engine(), engine()) as pair:
        failing = getattr(pair, side)
        step = "forward" if side == "prefill_engine" else "decode"
        healthy = getattr(failing, step)

        def fail_once(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(failing, step, healthy)
            raise RuntimeError("injected")

        monkeypatch.setattr(failing, step, fail_once)
        call = pair.call(prompt_of(40), greedy(12))
        call.wait_for(Finished if side == "prefill_engine" else Ended)
        call.wait()
        end = call.prefill_end if side == "prefill_engine" else call.ended
        assert end is not None
        assert isinstance(end.error, Internal)
        assert "injected" in end.error.message
        assert_serves(pair, oracle)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_queued_prompt_whose_link_breaks_ends_before_its_turn(
    engine: EngineFactory, oracle: Engine, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    steps = threading.Semaphore(0)
    with open_pair(engine(), engine(), transport=transport, token_budget=32) as pair:
        forward = pair.prefill_engine.forward

        def one_step(*args: Any, **kwargs: Any) -> torch.Tensor:
            assert steps.acquire(timeout=TIMEOUT_S)
            return forward(*args, **kwargs)

        monkeypatch.setattr(pair.prefill_engine, "forward", one_step)
        ahead: queue.Queue[Any] = queue.Queue()
        pair.prefill.submit(  # four steps, and no transfer
            PrefillRequest(
                request_id="ahead",
                attempt=1,
                token_ids=prompt_of(128),
                num_prompt_tokens=128,
                sampling=greedy(1),
                input_class="short",
            ),
            ahead.put,
        )
        behind = pair.call(prompt_of(40), greedy(5)).wait_for(Reserved)
        assert behind.prefill is not None
        push = behind.prefill.push
        assert push is not None
        until(lambda: pair.sample("twinpool_decode_transfers_open"))  # or the rows would wait for a claim
        for link in list(pair.receiver._links):
            link.cut()
        until(lambda: push.error is not None)
        steps.release()  # of the prompt ahead; the broken one is found after it
        while not isinstance(end := behind.events.get(timeout=TIMEOUT_S), Finished):
            pass  # a router would cancel when the decode worker reports the break; this one does nothing
        assert isinstance(end.error, PeerLost)
        assert ahead.empty()
        steps.release(100)
        assert_serves(pair, oracle)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_nonsense_behind_right_rows_fails_its_request_only(
    engine: EngineFactory, oracle: Engine, transport: str
) -> None:
    """What a prefill worker sends with its commit: any bytes, mutated tokens, too many, none, unknown ones."""
    draw = random.Random(4)
    with open_pair(engine(), engine(), transport=transport) as pair:
        healthy = pair.prefill._encode_note

        def nonsense(first: FirstTokens) -> bytes:
            note = bytearray(healthy(first))
            kind = draw.randrange(5)
            if kind == 0:
                return draw.randbytes(draw.randrange(100))
            if kind == 1:
                return bytes(note) * draw.randrange(2, 100)
            if kind == 2:
                return b""
            if kind == 3:
                return pb.FirstTokens(
                    tokens=[pb.SampledToken(token_id=draw.randrange(1 << 16, 1 << 32))]
                ).SerializeToString()
            note[draw.randrange(len(note))] ^= 1 << draw.randrange(8)
            return bytes(note)

        pair.prefill._encode_note = nonsense
        ends = [pair.call(prompt_of(20 + number), greedy(3)).wait().ended for number in range(60)]
        pair.prefill._encode_note = healthy
        assert {end.reason for end in ends if end is not None} <= {Reason.TRANSFER_FAILED, Reason.FINISHED}
        failed = [end for end in ends if end is not None and end.reason is Reason.TRANSFER_FAILED]
        assert len(failed) > 40
        assert all(isinstance(end.error, TransferFailed) for end in failed)
        assert_serves(pair, oracle)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_peer_with_other_weights_is_refused_and_says_so(
    engine: EngineFactory, tmp_path: Path, transport: str
) -> None:  # C8
    other = load_engine(tiny_models.make(tmp_path / "other", "llama", seed=1))
    with open_pair(other, engine(), transport=transport) as pair:
        call = pair.call(prompt_of(40), greedy(5)).wait()
        assert call.prefill_end is not None
        assert isinstance(call.prefill_end.error, Incompatible)
        deadline = time.monotonic() + TIMEOUT_S  # counted by the link's thread, after it has told the sender
        while pair.sample("twinpool_decode_transfer_refusals_total", error="Incompatible") != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
