from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from decode.metrics import DecodeMetrics
from decode.request import Ended, Event, Generation, Output, Reason, Request, Reserved, Token
from decode.scheduler import Limits, Scheduler
from decode.swap import SwapArea
from engine.block_pool import BlockPool
from engine.kv_cache import KvCache, KvLayout
from engine.sampling import Sampled
from engine.state_pool import StatePool
from tests.stateful import StatefulLayout
from twinpool.errors import Duplicate, InvalidRequest, Overloaded
from twinpool.sampling import FinishReason, SamplingParams

BLOCK = 4


@dataclass(eq=False)
class FakeReservation:
    """Stands in for kvtransfer's: knows its rows, and whether they were released."""

    generation: Generation
    block_ids: list[int]
    target: bytes = b"target"
    released: bool = False
    fenced: bool = True  # what release finds: no byte can land any more

    def release(self) -> bool:
        self.released = True
        return self.fenced


class Router:
    """A session that keeps nothing: events are read from the desk."""

    def deliver(self, outputs: list[Output]) -> None:
        raise AssertionError("the scheduler emits; the worker delivers")


@dataclass
class Desk:
    """A scheduler with everything around it faked: time, reservations, and a model that says 7."""

    rows: int = 32
    states: int = 0  # 0: a model that has none
    swap_rows: int = 32
    max_batch: int = 8
    max_waiting: int = 8
    now: float = 100.0
    events: list[tuple[str, int, Event]] = field(default_factory=list)
    reservations: dict[str, FakeReservation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK, kv_dtype="int8")
        layout = StatefulLayout(block_size=BLOCK) if self.states else plain
        self.blocks = BlockPool(self.rows, BLOCK)
        cache = KvCache(layout, self.rows, num_states=self.states)
        self.swap = SwapArea(cache, self.swap_rows)
        self.cache, self.state_pool = cache, StatePool(cache)
        self.router = Router()
        self.scheduler = Scheduler(
            Limits(
                max_batch=self.max_batch, max_waiting=self.max_waiting, vocab_size=1000, max_context=self.rows * BLOCK
            ),
            self.blocks,
            self.state_pool,
            self.swap,
            reserve=self._reserve,  # type: ignore[arg-type]
            emit=lambda generation, event: self.events.append(
                (generation.request.request_id, generation.request.attempt, event)
            ),
            metrics=DecodeMetrics(CollectorRegistry()),
        )

    def _reserve(self, generation: Generation, block_ids: list[int], timeout_s: float) -> FakeReservation:
        assert timeout_s > 0
        reservation = FakeReservation(generation, block_ids)
        self.reservations[generation.request.request_id] = reservation
        return reservation

    def submit(self, name: str, length: int = 5, *, n: int = 1, max_tokens: int = 20, **options: Any) -> None:
        session = options.pop("session", self.router)
        request = Request(
            request_id=name,
            attempt=options.pop("attempt", 1),
            token_ids=list(range(10, 10 + length)),
            num_prompt_tokens=length,
            sampling=SamplingParams(n=n, max_tokens=max_tokens),
            **options,
        )
        self.scheduler.submit(request, session, self.now)
        self.scheduler.tick(self.now)

    def commit(self, name: str, *tokens: Sampled) -> None:
        generation = self.reservations[name].generation
        first = tokens or (Sampled(7),) * generation.request.sampling.n
        self.scheduler.commit(generation, first, self.now)

    def start(self, name: str, length: int = 5, **options: Any) -> None:
        self.submit(name, length, **options)
        self.commit(name)

    def step(self, seconds: float = 0.01) -> list[str]:
        """One step: who was in it. The model says 7, and ends a choice at its max_tokens."""
        self.scheduler.tick(self.now)
        batch = self.scheduler.next_batch()
        self.now += seconds
        sampled = [
            Sampled(7, finish_reason=FinishReason.LENGTH)
            if len(each.output_token_ids) + 1 == each.sampling.max_tokens
            else Sampled(7)
            for each in batch
        ]
        for each in batch:
            assert len(each.block_ids) * BLOCK >= each.num_tokens
            assert (each.state is not None) == bool(self.states)
        assert len({each.state for each in batch if each.state is not None}) in (0, len(batch))
        names = [f"{each.generation.request.request_id}.{each.choice}" for each in batch]
        self.scheduler.advance(batch, sampled, self.now)
        return names

    def of(self, name: str, kind: type) -> list[Any]:
        return [event for owner, _, event in self.events if owner == name and isinstance(event, kind)]

    def reason(self, name: str) -> Reason:
        (ended,) = self.of(name, Ended)
        return ended.reason


@pytest.fixture
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Parametrize it with a dict of its sizes. At the end everything is cancelled and must be free."""
    desk = Desk(**getattr(request, "param", {}))
    yield desk
    desk.scheduler.end_all(Reason.CANCELLED)
    assert desk.blocks.num_free == desk.rows
    assert desk.swap.num_free == desk.swap_rows
    assert desk.state_pool.num_free == desk.states
    owners = [(owner, attempt) for owner, attempt, event in desk.events if isinstance(event, Ended)]
    assert len(owners) == len(set(owners))


def sized(**sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("desk", [sizes], indirect=True)


def test_reserves_the_prompts_rows_and_one_to_grow_into(desk: Desk) -> None:
    desk.submit("aligned", length=8)
    desk.submit("partial", length=9)
    assert len(desk.reservations["aligned"].block_ids) == 2
    assert len(desk.reservations["partial"].block_ids) == 3
    assert desk.blocks.num_free == 32 - 3 - 3
    assert desk.of("aligned", Reserved) == [Reserved(b"target")]


def test_tokens_come_one_a_step_and_rows_go_with_the_last(desk: Desk) -> None:
    desk.start("a", max_tokens=4)
    while desk.step():
        pass
    assert len(desk.of("a", Token)) == 3  # the first was prefill's
    assert desk.reason("a") is Reason.FINISHED
    assert desk.blocks.num_free == 32


def test_choices_share_full_blocks(desk: Desk) -> None:
    desk.start("a", length=10, n=3)
    assert desk.blocks.num_free == 32 - 2 - 3
    assert desk.step() == ["a.0", "a.1", "a.2"]


def test_finished_first_token_takes_no_step(desk: Desk) -> None:
    desk.submit("a", n=2)
    desk.commit("a", Sampled(7, finish_reason=FinishReason.STOP), Sampled(7))
    assert desk.step() == ["a.1"]
    desk.submit("b", n=2)
    desk.commit("b", *[Sampled(7, finish_reason=FinishReason.STOP)] * 2)
    assert desk.reason("b") is Reason.FINISHED


@sized(max_batch=2)
def test_batch_has_its_limit_and_nobody_is_left_behind(desk: Desk) -> None:
    for name in "abc":
        desk.submit(name)
        if name in desk.reservations:
            desk.commit(name)
    assert desk.step() == ["a.0", "b.0"]
    assert desk.scheduler.num_waiting == 1
    desk.scheduler.cancel("a", 1)
    desk.scheduler.tick(desk.now)
    desk.commit("c")
    assert sorted(desk.step()) == ["b.0", "c.0"]


def test_strictest_target_limits_the_batch_and_all_take_turns(desk: Desk) -> None:
    for name in "abcdef":
        desk.start(name, max_tokens=40, tpot_target_s=0.05)
    for _ in range(20):
        desk.scheduler.pace.observe(1, 0.02)
        desk.scheduler.pace.observe(4, 0.08)
    turns: dict[str, int] = {}
    for _ in range(30):
        batch = desk.step()
        assert len(batch) == 2
        for name in batch:
            turns[name] = turns.get(name, 0) + 1
    assert set(turns.values()) == {10}


def test_strict_request_is_served_before_relaxed_ones_which_still_move(desk: Desk) -> None:
    for name in "bcde":
        desk.start(name, max_tokens=90)
    desk.start("a", max_tokens=90, tpot_target_s=0.02)
    for _ in range(20):
        desk.scheduler.pace.observe(1, 0.01)
        desk.scheduler.pace.observe(4, 0.04)
    batches = [desk.step() for _ in range(40)]
    assert all(len(batch) == 2 for batch in batches)
    assert sum("a.0" in batch for batch in batches) >= 38
    for name in "bcde":
        assert sum(f"{name}.0" in batch for batch in batches) >= 5


@sized(rows=6)
def test_waits_in_order_until_rows_are_free(desk: Desk) -> None:
    desk.start("a", length=12, max_tokens=2)
    desk.submit("b", length=12, max_tokens=5)
    desk.submit("c", length=3)  # would fit, but is behind b
    desk.submit("d", length=3, priority=1)
    assert set(desk.reservations) == {"a", "d"}
    desk.step()
    desk.step()
    assert desk.reason("a") is Reason.FINISHED
    desk.scheduler.cancel("d", 1)
    desk.scheduler.tick(desk.now)
    assert set(desk.reservations) == {"a", "b", "c", "d"}


@sized(rows=6, max_waiting=1)
def test_full_queue_and_a_wait_too_long_say_so(desk: Desk) -> None:
    desk.start("a", length=18, max_tokens=5)
    desk.submit("b", length=8, max_tokens=5, timeout_s=0.5)
    desk.submit("c", length=8, max_tokens=5)
    assert desk.reason("c") is Reason.FAILED
    assert isinstance(desk.of("c", Ended)[0].error, Overloaded)
    desk.now += 1
    desk.scheduler.tick(desk.now)
    assert desk.reason("b") is Reason.FAILED
    assert isinstance(desk.of("b", Ended)[0].error, Overloaded)
    assert "b" not in desk.reservations


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"length": 200}, "prompt"),
        ({"length": 120, "n": 8, "max_tokens": 8}, "prompt"),
        ({"max_tokens": 1000}, "sampling.max_tokens"),
    ],
)
def test_what_never_fits_is_rejected(desk: Desk, options: dict[str, Any], field: str) -> None:
    desk.submit("a", **options)
    assert desk.reason("a") is Reason.REJECTED
    error = desk.of("a", Ended)[0].error
    assert isinstance(error, InvalidRequest)
    assert error.field == field


def test_same_and_older_attempts_are_refused_and_a_newer_one_takes_over(desk: Desk) -> None:
    desk.start("a", attempt=2)
    for attempt in (2, 1):
        desk.events.clear()
        desk.submit("a", attempt=attempt)
        assert desk.reason("a") is Reason.REJECTED
        assert isinstance(desk.of("a", Ended)[0].error, Duplicate)
    desk.events.clear()
    desk.submit("a", attempt=3)
    assert [(attempt, type(event)) for _, attempt, event in desk.events] == [(2, Ended), (3, Reserved)]
    desk.events.clear()
    desk.scheduler.cancel("a", 2)  # of an attempt that is gone
    assert desk.events == []


def test_resumed_choices_of_one_request_live_side_by_side(desk: Desk) -> None:
    for choice in range(3):
        desk.start("a", attempt=2 + choice, first_choice=choice)
    assert desk.step() == ["a.0", "a.1", "a.2"]
    assert not desk.of("a", Ended)


@sized(rows=8)
def test_least_senior_sequence_is_swapped_out_and_nobody_new_comes_in(desk: Desk) -> None:
    desk.start("low", length=4, max_tokens=25, priority=-1)
    desk.start("old", length=4, max_tokens=25)
    desk.start("young", length=4, max_tokens=25)
    while desk.scheduler.num_swapped < 2:
        desk.step()
    assert desk.step() == ["old.0"]
    desk.submit("new", length=1)
    assert "new" not in desk.reservations
    while not desk.of("old", Ended):
        desk.step()
    assert sorted(desk.step()) == ["low.0", "young.0"] or desk.scheduler.num_swapped == 1
    while desk.step():
        pass
    for name in ("low", "old", "young"):
        assert len(desk.of(name, Token)) == 24
        assert desk.reason(name) is Reason.FINISHED
    assert "new" in desk.reservations


@sized(rows=6, swap_rows=0)
def test_without_swap_the_least_senior_request_ends_as_preempted(desk: Desk) -> None:
    desk.start("old", length=8, max_tokens=15)
    desk.start("young", length=4, max_tokens=15)
    while desk.step():
        pass
    assert desk.reason("young") is Reason.PREEMPTED
    assert desk.reason("old") is Reason.FINISHED


@sized(rows=5)
def test_reservations_in_the_way_are_waited_for(desk: Desk) -> None:
    desk.start("a", length=4, max_tokens=16)
    desk.submit("b", length=7, max_tokens=5)
    while desk.step():
        pass
    assert desk.scheduler.num_swapped == 1  # b's rows are not there yet, and not to be taken away
    assert len(desk.of("a", Token)) == 8
    desk.commit("b")
    while desk.step():
        pass
    assert desk.reason("a") is Reason.FINISHED
    assert desk.reason("b") is Reason.FINISHED


def test_lost_router_takes_its_requests_with_it(desk: Desk) -> None:
    other = Router()
    desk.start("mine")
    desk.submit("waiting to arrive")
    desk.start("other", session=other)
    desk.scheduler.end_session(desk.router)
    assert desk.reason("mine") is Reason.CANCELLED
    assert desk.reason("waiting to arrive") is Reason.CANCELLED
    assert desk.reservations["waiting to arrive"].released
    assert desk.step() == ["other.0"]


def test_commit_after_the_end_changes_nothing(desk: Desk) -> None:
    desk.submit("a")
    desk.scheduler.cancel("a", 1)
    desk.commit("a")
    assert desk.step() == []
    assert desk.blocks.num_free == 32


def test_commit_with_other_tokens_than_asked_is_a_failed_transfer(desk: Desk) -> None:
    desk.submit("a", n=2)
    desk.commit("a", Sampled(7))
    assert desk.reason("a") is Reason.TRANSFER_FAILED
    desk.submit("b")
    desk.commit("b", Sampled(1000))
    assert desk.reason("b") is Reason.TRANSFER_FAILED


def test_cancel_of_every_choice_ends_the_request(desk: Desk) -> None:
    desk.submit("a", n=2)
    for choice in (0, 1, 1):
        desk.scheduler.cancel("a", 1, choice)
    assert desk.reason("a") is Reason.FINISHED
    desk.start("b", n=2)
    desk.step()
    for choice in (1, 0, 0):
        desk.scheduler.cancel("b", 1, choice)
    assert desk.reason("b") is Reason.FINISHED


def test_rows_that_a_sender_might_still_write_are_kept_until_it_does_not(desk: Desk) -> None:
    desk.submit("a")
    held = desk.rows - desk.blocks.num_free
    desk.reservations["a"].fenced = False
    desk.scheduler.cancel("a", 1)
    assert isinstance(desk.events[-1][2], Ended)
    assert desk.rows - desk.blocks.num_free == held > 0
    desk.scheduler.fenced(desk.reservations["a"].generation)
    assert desk.blocks.num_free == desk.rows


# Models that remember something for every sequence


@sized(states=3)
def test_every_choice_has_a_state_from_admission_on(desk: Desk) -> None:
    desk.submit("a", n=2)
    assert desk.state_pool.num_free == 1
    desk.submit("b", n=2)
    desk.submit("c")  # would fit, but is behind b
    assert set(desk.reservations) == {"a"}
    desk.commit("a", Sampled(7, finish_reason=FinishReason.STOP), Sampled(7))
    assert desk.state_pool.num_free == 2
    desk.scheduler.tick(desk.now)
    assert set(desk.reservations) == {"a", "b"}
    desk.submit("d", n=4)
    assert desk.reason("d") is Reason.REJECTED
    assert desk.of("d", Ended)[0].error.field == "sampling.n"
    desk.scheduler.cancel("a", 1)
    desk.scheduler.tick(desk.now)
    assert set(desk.reservations) == {"a", "b", "c"}


@sized(states=3)
def test_choices_get_copies_of_the_state_that_arrived(desk: Desk) -> None:
    desk.submit("a", n=3)
    generation = desk.reservations["a"].generation
    for buffer in desk.cache.buffers_of("sequence"):
        buffer.fill_(1)
        buffer[generation.state] = 7
    desk.commit("a")
    assert len({each.state for each in generation.sequences}) == 3
    assert all(bool((buffer == 7).all()) for buffer in desk.cache.buffers_of("sequence"))


@sized(states=2)
def test_a_prompt_that_is_computed_here_finds_nothing_of_others_in_its_state(desk: Desk) -> None:
    for buffer in desk.cache.buffers_of("sequence"):
        buffer.fill_(7)
    desk.submit("a", local_prefill=True)
    (chunk,) = desk.scheduler.next_chunks()
    assert chunk.generation.state is not None
    for buffer in desk.cache.buffers_of("sequence"):
        assert not buffer[chunk.generation.state].any()


@sized(states=3, rows=8)
def test_states_go_to_the_swap_area_and_back(desk: Desk) -> None:
    for name in ("old", "young"):
        desk.start(name, length=4, max_tokens=25)
    young = desk.reservations["young"].generation.sequences[0]
    for buffer in desk.cache.buffers_of("sequence"):
        buffer[young.state] = 7
    while not desk.scheduler.num_swapped:
        desk.step()
    assert young.state is None
    assert desk.state_pool.num_free == 2
    assert desk.swap.num_free == 32 - len(young.slots)
    for buffer in desk.cache.buffers_of("sequence"):
        buffer.fill_(1)
    while desk.scheduler.num_swapped:
        desk.step()
    assert young.state is not None
    assert all(bool((buffer[young.state] == 7).all()) for buffer in desk.cache.buffers_of("sequence"))
    while desk.step():
        pass
    assert desk.reason("old") is Reason.FINISHED
    assert desk.reason("young") is Reason.FINISHED


@sized(states=3, rows=6, swap_rows=3)
def test_no_room_to_swap_a_state_is_no_room(desk: Desk) -> None:
    desk.start("old", length=8, max_tokens=15)
    desk.start("young", length=4, max_tokens=15)
    while desk.step():
        pass
    assert desk.reason("young") is Reason.PREEMPTED
    assert desk.reason("old") is Reason.FINISHED


@sized(states=3)
def test_states_that_a_sender_might_still_write_are_kept_until_it_does_not(desk: Desk) -> None:
    desk.submit("a", n=2)
    desk.reservations["a"].fenced = False
    desk.scheduler.cancel("a", 1)
    assert desk.state_pool.num_free == 1
    desk.scheduler.fenced(desk.reservations["a"].generation)
    assert desk.state_pool.num_free == 3
