"""Which pair is chosen."""

from __future__ import annotations

from router.placement import Demand, Pair, Placement
from router.pools import Registry, WorkerLoad
from tests.router.workers import join, registry
from twinpool.errors import WorkerLost


def demand(**fields: object) -> Demand:
    values = {"num_tokens": 32, "num_choices": 1, "max_new_tokens": 16}
    return Demand(**(values | fields))  # type: ignore[arg-type]


def placement(pools: Registry, **limits: int) -> Placement:
    return Placement(pools, **({"prefill_slots": 8, "decode_slots": 8} | limits))


def ids(pair: Pair | None) -> tuple[str, str]:
    assert pair is not None
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
    assert chooser.choose(demand()) is not None
    assert chooser.choose(demand()) is None
    assert first is not None
    first.release()
    first.release()
    assert chooser.choose(demand()) is not None


async def test_rows_bound_what_a_decode_worker_gets() -> None:
    pools = registry()
    join(pools, "p0")
    join(pools, "d0", rows_free=10)
    chooser = placement(pools)
    assert demand(num_tokens=100).rows(16) == 7 + 1
    assert chooser.choose(demand(num_tokens=100)) is not None
    assert chooser.choose(demand(num_tokens=100)) is None
    assert chooser.choose(demand(num_tokens=10)) is not None


async def test_idle_worker_is_asked_even_when_the_request_seems_too_large() -> None:
    pools = registry()
    join(pools, "p0")
    join(pools, "d0", rows_free=10)
    assert placement(pools).choose(demand(num_tokens=1000)) is not None


async def test_single_token_answers_claim_no_decode_worker() -> None:
    pools = registry()
    join(pools, "p0")
    decode = join(pools, "d0")
    pair = placement(pools).choose(demand(max_new_tokens=1))
    assert pair is not None
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
