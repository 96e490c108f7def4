"""Shares are kept whatever pieces the parties bring, and nothing is remembered for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router import fairness
from router.fairness import FairShare

PARTY = st.tuples(st.sampled_from([0.5, 1.0, 2.0, 8.0]), st.lists(st.floats(1, 1500), min_size=1, max_size=8))


@given(st.lists(PARTY, min_size=2, max_size=5), st.integers(20, 300))
def test_work_over_weight_differs_by_no_more_than_the_largest_pieces(
    parties: list[tuple[float, list[float]]], turns: int
) -> None:
    share, served = FairShare(), [0.0] * len(parties)
    taken = [0] * len(parties)
    for _ in range(turns):
        party = int(share.first(str(i) for i in range(len(parties))))
        weight, pieces = parties[party]
        work = pieces[taken[party] % len(pieces)]
        taken[party] += 1
        served[party] += work / weight
        share.charge(str(party), work, weight)
    for i, (weight, pieces) in enumerate(parties):
        for j, (other_weight, other_pieces) in enumerate(parties):
            bound = max(pieces) / weight + max(other_pieces) / other_weight
            assert served[i] - served[j] <= bound + 1e-6, (i, j)


@given(st.integers(1, 1000), st.floats(1, 100))
def test_who_was_away_neither_saved_up_nor_pays(turns: int, work: float) -> None:
    share = FairShare()
    share.charge("late", work)
    for _ in range(turns):
        share.charge("busy", work)
    order = []
    for _ in range(20):
        party = share.first(["busy", "late"])
        order.append(party)
        share.charge(party, work)
    assert 9 <= order.count("late") <= 11


def test_parties_are_forgotten() -> None:
    share = FairShare()
    for i in range(4 * fairness.MOST_PARTIES):
        share.charge(f"tenant-{i}", 10.0)
    assert len(share) <= fairness.MOST_PARTIES
    share.idle()
    assert len(share) == 0
    assert share.first(["a", "b"]) == "a"
