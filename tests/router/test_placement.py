"""Which pair is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from router.classifier import Classifier, SlaClass
from router.decisions import figures
from router.placement import Demand, Pair, Placement, Wait
from router.pools import Pool, Registry, Worker, WorkerLoad, WorkerState
from tests.router.workers import join, registry
from twinpool.errors import TransferFailed, WorkerLost
from twinpool.prefix import PromptDigests


def demand(**fields: object) -> Demand:
    values = {"num_tokens": 32, "num_choices": 1, "max_new_tokens": 16}
    return Demand(**(values | fields))  # type: ignore[arg-type]


def placement(pools: Registry, **limits: Any) -> Placement:
    classifier = Classifier([SlaClass(name="a")], "a", 512)
    return Placement(pools, classifier, **({"prefill_slots": 8, "decode_slots": 8, "policy": "least_loaded"} | limits))


def ids(pair: Pair | Wait) -> tuple[str, str]:
    assert isinstance(pair, Pair)
    assert pair.decode is not None
    return pair.prefill.info.worker_id, pair.decode.info.worker_id


async def test_load_spreads_over_equal_workers() -> None:
    pools = registry()
    for name in ("p0", "p1", "d0", "d1"):
        join(pools, name)
    chooser = placement(pools)
    chosen = [ids(chooser.choose(demand())) for _ in range(8)]
    assert sorted(prefill for prefill, _ in chosen) == ["p0"] * 4 + ["p1"] * 4
    assert sorted(decode for _, decode in chosen) == ["d0"] * 4 + ["d1"] * 4


async def test_what_other_routers_put_on_a_worker_counts() -> None:
    pools = registry()
    join(pools, "p0")
    join(pools, "d0", running=5)
    join(pools, "d1")
    assert [ids(placement(pools).choose(demand()))[1] for _ in range(5)] == ["d1"] * 5


async def test_long_prompts_count_by_their_tokens() -> None:
    pools = registry()
    for name in ("p0", "p1", "d0"):
        join(pools, name)
    chooser = placement(pools)
    first = ids(chooser.choose(demand(num_tokens=1000)))[0]
    others = {ids(chooser.choose(demand(num_tokens=10)))[0] for _ in range(5)}
    assert others == {"p0", "p1"} - {first}


async def test_pairs_have_one_fingerprint() -> None:
    pools = registry()
    for name, fingerprint in (("p0", "a"), ("p1", "b"), ("d1", "b"), ("d2", "c")):
        join(pools, name, fingerprint=fingerprint)
    assert ids(placement(pools).choose(demand())) == ("p1", "d1")


async def test_avoided_workers_are_taken_only_when_there_is_no_other() -> None:
    pools = registry()
    join(pools, "p0")
    join(pools, "d0")
    join(pools, "d1", running=7)
    assert ids(placement(pools).choose(demand(avoid=("p0", "d0")))) == ("p0", "d1")


async def test_slots_bound_what_a_worker_gets_and_come_back() -> None:
    pools = registry()
    join(pools, "p0")
    join(pools, "d0")
    chooser = placement(pools, decode_slots=2)
    first = chooser.choose(demand())
    assert chooser.choose(demand()) is not Wait.FOR_ROOM
    assert chooser.choose(demand()) is Wait.FOR_ROOM
    assert isinstance(first, Pair)
    first.release()
    first.release()
    assert isinstance(chooser.choose(demand()), Pair)


async def test_rows_bound_what_a_decode_worker_gets() -> None:
    pools = registry()
    join(pools, "p0")
    join(pools, "d0", rows_free=10)
    chooser = placement(pools)
    assert demand(num_tokens=100).rows(16) == 7 + 1
    assert chooser.choose(demand(num_tokens=100)) is not Wait.FOR_ROOM
    assert chooser.choose(demand(num_tokens=100)) is Wait.FOR_ROOM
    assert isinstance(chooser.choose(demand(num_tokens=10)), Pair)


async def test_idle_worker_is_asked_even_when_the_request_seems_too_large() -> None:
    pools = registry()
    join(pools, "p0")
    join(pools, "d0", rows_free=10)
    assert isinstance(placement(pools).choose(demand(num_tokens=1000)), Pair)


async def test_single_token_answers_claim_no_decode_worker() -> None:
    pools = registry()
    join(pools, "p0")
    decode = join(pools, "d0")
    pair = placement(pools).choose(demand(max_new_tokens=1))
    assert isinstance(pair, Pair)
    assert pair.decode is None
    assert not decode.claims


async def test_what_is_missing_is_named() -> None:
    pools = registry()
    chooser = placement(pools)
    assert "prefill" in (chooser.missing() or "")
    prefill = join(pools, "p0")
    assert "decode" in (chooser.missing() or "")
    decode = join(pools, "d0", fingerprint="other")
    assert "no prefill worker fits any decode worker" in (chooser.missing() or "")
    join(pools, "d1")
    assert chooser.missing() is None
    pools.report(decode, WorkerLoad(draining=True))
    pools.failed(prefill, WorkerLost("gone"))
    assert "1 joined, none of them ready" in (chooser.missing() or "")
    await pools.close()


def predicting(pools: Registry, **limits: Any) -> Placement:
    chooser = placement(pools, policy="predict", **limits)
    for worker in pools:
        for tokens in (10, 100, 400) * 10:  # of 30 observations the pool's mean keeps a fifteenth of the say
            if worker.info.pool is Pool.PREFILL:
                chooser.predictor.prefilled(worker.info.worker_id, tokens, 0, tokens * speed_of(worker.info.worker_id))
            else:
                chooser.predictor.decoded(worker.info.worker_id, 1 + tokens / 50, 20 * speed_of(worker.info.worker_id))
    return chooser


def speed_of(worker_id: str) -> float:
    """Seconds a token: a worker whose name ends in "slow" takes eight times as long."""
    return 0.008 if worker_id.endswith("slow") else 0.001


async def test_prediction_uses_fast_workers_more_and_slow_ones_when_those_are_busy() -> None:
    pools = registry()
    for name in ("p0", "p-slow", "d0", "d-slow"):
        join(pools, name, rows_free=10000)
    chooser = predicting(pools, prefill_slots=100, decode_slots=100)
    chosen = [ids(chooser.choose(demand(num_tokens=300, ttft_s=1.0, tpot_s=0.1))) for _ in range(3)]
    assert {prefill for prefill, _ in chosen} == {"p0"}
    assert {decode for _, decode in chosen} == {"d0"}
    more = [chooser.choose(demand(num_tokens=500, ttft_s=1.0)) for _ in range(30)]
    assert {pair.prefill.info.worker_id for pair in more if isinstance(pair, Pair)} == {"p0", "p-slow"}
    assert more[-1] is Wait.FOR_TIME  # who waits goes to the first that has done enough


async def test_cached_prefix_is_subtracted_and_draws_the_request() -> None:
    pools = registry()
    for name in ("p0", "p1", "d0"):
        join(pools, name, rows_free=10000)
    prompt = list(range(1000))
    there = frozenset(PromptDigests(prompt).of(16)[:60])
    pools.report(next(w for w in pools if w.info.worker_id == "p1"), WorkerLoad(rows_free=10000, prefixes=there))
    for policy in ("prefix", "predict"):
        chooser = placement(pools, policy=policy)
        pair = chooser.choose(demand(num_tokens=1000, digests=PromptDigests(prompt), ttft_s=1.0))
        assert isinstance(pair, Pair)
        chosen = pair.choice.chosen.prefill
        assert (chosen.worker.info.worker_id, chosen.cached_tokens) == ("p1", 960)
        assert pair.input_class == "short"  # forty tokens to compute
        pair.release()
        salted = chooser.choose(demand(num_tokens=1000, digests=PromptDigests(prompt, "other tenant")))
        assert isinstance(salted, Pair)
        assert all(each.prefill.cached_tokens == 0 for each in salted.choice.candidates)
        assert salted.input_class == "long"
        salted.release()


async def test_a_reported_digest_stands_for_all_that_led_to_it() -> None:
    pools = registry()
    prefill = join(pools, "p0")
    prompt = PromptDigests(list(range(1000)))
    for held, tokens in (([29], 480), ([3, 29], 480), ([], 0)):
        there = frozenset(prompt.of(16)[block] for block in held)
        pools.report(prefill, WorkerLoad(prefixes=there))
        assert prefill.cached_tokens(prompt) == tokens
    assert prefill.cached_tokens(PromptDigests(list(range(1000)), "other tenant")) == 0


async def test_round_robin_takes_turns_whatever_the_load() -> None:
    pools = registry()
    for name, running in (("p0", 0), ("p1", 0), ("d0", 9), ("d1", 0)):
        join(pools, name, running=running, rows_free=10000)
    chooser = placement(pools, policy="round_robin", prefill_slots=100, decode_slots=100)
    chosen = [ids(chooser.choose(demand(num_tokens=i % 2 * 3000 + 10))) for i in range(8)]
    assert [prefill for prefill, _ in chosen] == ["p0", "p1"] * 4
    assert [decode for _, decode in chosen] == ["d0", "d1"] * 4


async def test_a_worker_of_which_nothing_is_known_counts_as_busy_as_the_others_and_not_as_idle() -> None:  # R6
    pools = registry()
    for name in ("p0", "d0"):
        join(pools, name, rows_free=10000)
    chooser = placement(pools, policy="predict", prefill_slots=100, decode_slots=100, lookahead_s=100)
    for n in range(1, 41):
        chooser.predictor.prefilled("p0", 100 * n, 0, 0.1 * n)
        chooser.predictor.decoded("d0", n, 0.010 + 0.002 * n)
    assert all(isinstance(chooser.choose(demand(num_tokens=1000)), Pair) for _ in range(9))
    for name in ("p1", "d1"):
        join(pools, name, rows_free=10000)
    pair = chooser.choose(demand(num_tokens=100, ttft_s=1.0, tpot_s=0.1))
    assert isinstance(pair, Pair)
    shown = {(each["prefill_worker"], each["decode_worker"]): each for each in map(figures, pair.choice.candidates)}
    known, unknown = shown["p0", "d0"], shown["p1", "d1"]
    assert (known["known"], unknown["known"]) == (True, False)
    assert unknown["queue_ms"] == pytest.approx(9000, rel=0.01)  # p0 has nine prompts of a second each
    assert unknown["tpot_ms"] == pytest.approx(known["tpot_ms"], rel=0.1)  # of a batch of ten


async def test_pairs_that_are_predicted_to_be_alike_take_turns() -> None:
    pools = registry()
    for name in ("p0", "p1", "d0"):
        join(pools, name, rows_free=10000)
    chooser = placement(pools, policy="predict")
    for n in range(1, 41):
        for name, speed in (("p0", 0.00100), ("p1", 0.00102)):
            chooser.predictor.prefilled(name, 100 * n, 0, 100 * n * speed)
        chooser.predictor.decoded("d0", n, 0.020)
    chosen = []
    for _ in range(6):
        pair = chooser.choose(demand(num_tokens=300, ttft_s=1.0, tpot_s=0.1))
        assert isinstance(pair, Pair)
        chosen.append(ids(pair)[0])
        pair.release()
    assert sorted(chosen[:2]) == ["p0", "p1"]
    assert chosen == chosen[:2] * 3


async def test_worker_that_has_just_joined_gets_no_flood() -> None:
    pools = registry()
    for name in ("p0", "d0", "d1"):
        join(pools, name, rows_free=10000)
    chooser = predicting(pools, prefill_slots=1000, decode_slots=1000, lookahead_s=1000)
    busy = [chooser.choose(demand()) for _ in range(60)]
    assert all(isinstance(pair, Pair) for pair in busy)
    join(pools, "d2", rows_free=10000)
    later = [ids(chooser.choose(demand()))[1] for _ in range(12)]
    assert 1 <= later.count("d2") <= 1.5 * 12 / 3 + 1


async def test_what_is_placed_while_a_worker_waits_for_its_probe_gives_it_no_more_later() -> None:  # R6
    pools = registry()
    for name in ("p0", "d0", "d1"):
        join(pools, name, rows_free=10000)
    chooser = placement(pools, policy="least_loaded", prefill_slots=1000, decode_slots=1000)
    fresh = join(pools, "d2", rows_free=10000)
    fresh.proved = False
    assert all(ids(chooser.choose(demand()))[1] != "d2" for _ in range(60))
    fresh.proved = True
    later = [ids(chooser.choose(demand()))[1] for _ in range(12)]
    assert 1 <= later.count("d2") <= 1.5 * 12 / 3


async def test_decision_holds_every_candidate_with_its_figures_and_the_reason() -> None:
    pools = registry()
    for name in ("p0", "p1", "d0", "d1"):
        join(pools, name, rows_free=10000)
    chooser = predicting(pools)
    chooser.predictor.transferred("p0", "d0", 100, 100_000, 0.004)
    pair = chooser.choose(demand(num_tokens=200, ttft_s=1.0, tpot_s=0.1))
    assert isinstance(pair, Pair)
    shown = [figures(each) for each in pair.choice.candidates]
    assert {(each["prefill_worker"], each["decode_worker"]) for each in shown} == {
        (p, d) for p in ("p0", "p1") for d in ("d0", "d1")
    }
    assert (shown[0]["prefill_worker"], shown[0]["decode_worker"]) == ids(pair)
    for each in shown:
        assert each["prefill_ms"] == pytest.approx(200, rel=0.05)
        assert each["tpot_ms"] == pytest.approx(20, rel=0.1)
        assert each["ttft_ms"] >= each["prefill_ms"]
        assert each["known"]
    assert "of 4 candidates" in pair.choice.reason


async def test_workers_of_other_block_sizes_are_paired_and_rows_counted_in_their_own() -> None:  # C9, R8
    pools = registry()
    join(pools, "p0", block_size=16)
    small = join(pools, "d0", block_size=64, rows_free=3)
    join(pools, "d1", block_size=16, rows_free=100, fingerprint="other weights")
    chooser = placement(pools)
    pair = chooser.choose(demand(num_tokens=100, max_new_tokens=64))  # 2 blocks of 64 and 1 to grow
    assert ids(pair) == ("p0", "d0")
    assert small.rows_free == 0
    assert not isinstance(chooser.choose(demand(num_tokens=1)), Pair)  # and d1 is never taken instead


def suspect(pools: Registry, worker: Worker) -> None:
    for _ in range(3):
        pools.failed(worker, TransferFailed("a row was lost"))
    assert worker.state is WorkerState.SUSPECT


async def test_the_last_worker_of_a_pool_is_used_whatever_is_suspected_of_it() -> None:
    pools = registry()
    join(pools, "p0")
    last = join(pools, "d0")
    suspect(pools, last)
    chooser = placement(pools)
    assert chooser.missing() is None
    assert ids(chooser.choose(demand())) == ("p0", "d0")
    join(pools, "d1")
    assert [ids(chooser.choose(demand()))[1] for _ in range(3)] == ["d1"] * 3
    await pools.close()


async def test_of_several_suspects_the_least_suspect_is_used() -> None:
    pools = registry()
    join(pools, "p0")
    suspects = [join(pools, "d0"), join(pools, "d1")]
    for worker in suspects:
        suspect(pools, worker)
    chooser = placement(pools)
    pair = chooser.choose(demand())
    assert isinstance(pair, Pair)
    assert pair.decode is suspects[0]
    pools.failed(suspects[0], TransferFailed("and again"))
    pair.release()
    assert ids(chooser.choose(demand())) == ("p0", "d1")
    await pools.close()


async def test_a_worker_that_nobody_reaches_is_not_used_though_it_is_the_last() -> None:
    pools = registry()
    join(pools, "p0")
    pools.failed(join(pools, "d0"), WorkerLost("gone"))
    assert "no usable decode worker (1 joined" in (placement(pools).missing() or "")
    await pools.close()
