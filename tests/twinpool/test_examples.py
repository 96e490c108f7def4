"""The programs in examples/ run, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.twinpool.fake_router import FakeRouter

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ask", "Paris\n2 tokens; the first after 24 ms, then 6.0 ms each"),
        ("many", "8 questions"),
        ("tokens", "0: 'Paris' (stop)"),
    ],
)
def test_the_example_runs(router: FakeRouter, name: str, said: str) -> None:
    env = {**os.environ, "TWINPOOL_ROUTERS": router.address}
    answer = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert said in answer.stdout


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"ask", "many", "tokens"}
