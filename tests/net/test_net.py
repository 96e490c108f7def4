"""One deployment over two hosts with an emulated link of 1 Gbit/s and 1 ms between them (`make test-net`)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import tiny_models
from tests.fakes import Faults
from tests.flow.cluster import wait_until
from tests.flow.oracle import Oracle
from tests.net.lab import NotAllowed, rig, spread

PROMPT = [random.Random(37).randrange(10, 250) for _ in range(1024)]


@pytest.fixture(autouse=True)
def allowed() -> None:
    try:
        rig()
    except NotAllowed as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("models") / "tiny", "llama")


def test_a_long_prompt_over_a_real_link_is_answered_as_by_one_process(tmp_path: Path, tiny_model: Path) -> None:
    try:
        with spread(tmp_path, tiny_model) as deployment:
            answer = deployment.ask(prompt=PROMPT, max_tokens=20)
            assert answer["token_ids"] == Oracle(tiny_model).answer(PROMPT, 20, ignore_eos=True)
            assert answer["timeline"]["transfer_bytes"] == 3 * 64 * 1152  # layers, rows of 16 tokens, bytes a row
            wait_until(lambda: not deployment.held(), "rows at baseline")
            (line,) = [line for line in deployment.prefill.log.splitlines() if "KV rows for" in line]
            assert "go over tcp; cannot reach shm://" in line
            assert "needs the same network namespace" in line
    except NotAllowed as reason:
        pytest.skip(str(reason))


def test_a_link_that_is_cut_in_the_transfer_ends_the_request_by_its_deadline(
    tmp_path: Path, tiny_model: Path
) -> None:  # L7
    late = Faults(delay_ms=700, delay_from_region=1)
    try:
        with spread(tmp_path, tiny_model, faults=late) as deployment:
            probe = deployment.probes[2]
            probe.begin(prompt=PROMPT, max_tokens=20, deadline_s=4, announce=True)
            assert probe.end() == "first"
            deployment.lab.cut_or_restore()
            ended = probe.end()
            if "error" in ended:
                assert ended["error"] in ("Unavailable", "DeadlineExceeded", "WorkerLost", "PoolEmpty")
            else:  # the decode worker was in time to compute it all by itself
                assert ended["token_ids"] == Oracle(tiny_model).answer(PROMPT, 20, ignore_eos=True)
            deployment.lab.cut_or_restore()
            wait_until(lambda: deployment.ask(pools=True) == ["ready", "ready"], "both workers are back", 60)
            wait_until(lambda: not deployment.held(), "rows at baseline", 30)
            answer = deployment.ask(prompt=PROMPT, max_tokens=20)
            assert answer["token_ids"] == Oracle(tiny_model).answer(PROMPT, 20, ignore_eos=True)
            wait_until(lambda: not deployment.held(), "rows at baseline")
    except NotAllowed as reason:
        pytest.skip(str(reason))
