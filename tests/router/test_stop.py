"""Stop strings against a plain oracle that looks at the text character by character."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from router.stop import StopMatcher


def random_cases(count: int, seed: int) -> Iterator[tuple[list[str], list[str]]]:
    """Pieces of a text, and stop strings, of few distinct characters so that they meet in every way."""
    draw = random.Random(seed)

    def text(low: int, high: int) -> str:
        return "".join(draw.choices("abé", k=draw.randint(low, high)))

    for _ in range(count):
        yield [text(0, 4) for _ in range(draw.randint(0, 12))], [text(1, 5) for _ in range(draw.randint(0, 4))]


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text up to the first stop string to be complete, the longest of them where several are."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    matcher, shown = StopMatcher(stops), []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, matcher.flush()], False


def test_any_pieces_give_what_the_oracle_gives() -> None:
    for pieces, stops in random_cases(5000, seed=1):
        shown, stopped = run(pieces, stops)
        assert ("".join(shown), stopped) == oracle("".join(pieces), stops), (pieces, stops)


def test_nothing_is_held_back_that_cannot_become_a_stop_string() -> None:
    for pieces, stops in random_cases(5000, seed=2):
        matcher, pushed, shown = StopMatcher(stops), "", ""
        for piece in pieces:
            text, stopped = matcher.push(piece)
            if stopped:
                break
            pushed, shown = pushed + piece, shown + text
            held = pushed[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops), (pieces, stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["Par", "is"], ["Paris"], ["", ""]),
        (["a", "b", "c"], ["bd"], ["a", "", "bc", ""]),
        (["xEN", "D", "y"], ["END"], ["x", ""]),
        (["one two"], ["two", "one two"], [""]),
        (["plain"], [], ["plain", ""]),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: list[str]) -> None:
    assert run(pieces, stops)[0] == shown
