"""A minute of mixed load while workers are killed, drained, paused and added: nothing is lost, wrong or left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.cluster import REPO

SMALL = {"DTYPE": "fp32", "BLOCK_SIZE": "16", "MEMORY": "8MiB", "SWAP": "4MiB", "THREADS": "1"}


@pytest.mark.timeout(400)
def test_no_request_is_lost_while_workers_come_and_go(tiny_model: Path) -> None:
    env = {**os.environ, **{f"TWINPOOL_{name}": value for name, value in SMALL.items()}}
    command = [sys.executable, "-m", "bench.chaos", "--seconds", "60", "--clients", "4", "--model", str(tiny_model)]
    run = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=380)
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-2000:]}"
    figures = json.loads(run.stdout.splitlines()[-1])
    assert (figures["failed"], figures["wrong"], figures["leaked_rows"]) == (0, 0, 0)
    assert figures["finished"] > 0
    assert all(figures["faults"].values()), figures["faults"]
    ends = ("finished", "refused", "left", "expired", "failed")
    assert figures["sent"] == sum(figures[end] for end in ends)
