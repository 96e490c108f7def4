"""Commands from other threads."""

from __future__ import annotations

import threading

from service.inbox import Inbox


def test_commands_run_in_order_on_the_thread_that_runs_them() -> None:
    inbox, seen = Inbox(), list[tuple[int, str]]()
    threading.Thread(target=lambda: [inbox.put(lambda i=i: note(i)) for i in range(5)]).start()  # type: ignore[misc]

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    while len(seen) < 5:
        inbox.run(wait_s=5)
    assert seen == [(i, threading.current_thread().name) for i in range(5)]


def test_a_command_may_put_another_which_runs_in_the_same_turn() -> None:
    inbox, seen = Inbox(), list[str]()
    inbox.put(lambda: (seen.append("first"), inbox.put(lambda: seen.append("second")))[0])
    inbox.run(wait_s=0)
    assert seen == ["first", "second"]


def test_an_empty_inbox_returns() -> None:
    Inbox().run(wait_s=0)
    Inbox().run(wait_s=0.001)
