"""The online benchmark's arithmetic: arrivals, mixes, percentiles and goodput, on cases worked out by hand."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator

import grpc
import pytest

from bench import online
from bench.report import Outcome, Target, percentiles, summarize, table
from bench.workload import Shape, arrivals, parse_mix, prompts
from tests.twinpool.fake_router import FakeRouter, fail, two_tokens
from twinpool import errors
from twinpool.v1 import router_pb2 as v1

SHORT = Shape(name="short", weight=70, prompt_tokens=64, sla_class="interactive")
LONG = Shape(name="long", weight=30, prompt_tokens=1500, sla_class="batch")
TARGETS = {"interactive": Target(ttft_ms=500, tpot_ms=100), "batch": Target(ttft_ms=5000, tpot_ms=200)}


def test_arrivals_are_a_poisson_process_of_the_rate_asked_for() -> None:
    times = [arrival.at_s for arrival in arrivals(4.0, 4001, [SHORT, LONG], seed=1)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)  # exponential: deviation equals mean


def test_the_mix_is_exact_and_a_seed_repeats_it() -> None:
    planned = arrivals(1.0, 50, [SHORT, LONG], seed=3)
    assert sum(a.shape is SHORT for a in planned) == 35
    assert planned == arrivals(1.0, 50, [SHORT, LONG], seed=3)
    assert planned != arrivals(1.0, 50, [SHORT, LONG], seed=4)


def test_parse_mix() -> None:
    assert parse_mix("70:30") == (70.0, 30.0)
    assert parse_mix("1:0") == (1.0, 0.0)
    for wrong in ("70", "0:0", "-1:2", "a:b", "1:2:3"):
        with pytest.raises(ValueError, match=r"mix|convert"):
            parse_mix(wrong)


async def test_prompts_have_the_length_asked_for_and_share_no_beginning() -> None:
    async def tokenize(text: str) -> list[int]:
        return [ord(character) for character in text]

    async def detokenize(ids: object) -> str:
        return "".join(map(chr, ids))  # type: ignore[call-overload]

    texts = await prompts([64, 1500, 64, 64], "run", tokenize, detokenize, seed=0)
    assert [len(text) for text in texts] == [64, 1500, 64, 64]
    assert len({text[:40] for text in texts}) == 4
    assert len({text[-40:] for text in texts}) == 4


def outcome(due_s: float, token_s: list[float], *, sla_class: str = "interactive", error: str = "") -> Outcome:
    return Outcome(
        shape="short" if sla_class == "interactive" else "long",
        sla_class=sla_class,
        due_s=due_s,
        sent_s=due_s + 0.05,
        token_s=token_s,
        end_s=token_s[-1] if token_s else due_s + 1,
        error=error,
    )


def test_latency_counts_from_the_time_a_request_was_due() -> None:
    one = outcome(1.0, [1.4, 1.5, 1.7])
    assert one.ttft_ms == pytest.approx(400)  # sent 50 ms late: those count
    assert one.tpot_ms == pytest.approx(150)
    assert one.itl_ms == pytest.approx([100, 200])
    assert outcome(0.0, [0.1]).tpot_ms is None


def test_goodput_counts_requests_that_keep_both_targets_of_their_class() -> None:
    summary = summarize(
        [
            outcome(0.0, [0.4, 0.49]),  # good
            outcome(0.0, [0.6, 0.7]),  # first token late
            outcome(0.0, [0.4, 0.6]),  # tokens too far apart
            outcome(0.0, [0.4, 0.49], error="Unavailable"),  # failed half way
            outcome(1.0, [5.0, 5.1], sla_class="batch"),  # good in its class
            outcome(9.0, [], error="Overloaded"),
        ],
        TARGETS,
    )
    assert summary["duration_s"] == 10.0
    assert summary["goodput_rps"] == 0.2
    assert (summary["requests"], summary["completed"], summary["errors"]) == (6, 4, 2)
    assert summary["errors_by_kind"] == {"Unavailable": 1, "Overloaded": 1}
    assert summary["output_tokens_per_s"] == 1.0
    assert summary["by_shape"]["long"]["good"] == 1
    assert "interactive" in summary["targets"]
    assert [line.split()[:3] for line in table(summary).splitlines()[1:]] == [
        ["long", "1", "1"],
        ["short", "5", "1"],
        ["all", "6", "2"],
    ]


def test_a_target_of_zero_promises_nothing() -> None:
    assert outcome(0.0, [0.4, 9.0]).good(Target(ttft_ms=500, tpot_ms=0))
    assert not outcome(0.0, [0.6, 0.7]).good(Target(ttft_ms=500, tpot_ms=0))


def test_percentiles() -> None:
    assert percentiles(range(1, 102)) == {"p50": 51.0, "p90": 91.0, "p99": 100.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter()
    yield fake
    fake.close()


def test_a_run_ends_in_one_json_line_and_counts_every_request(
    router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [errors.Overloaded("full"), errors.PoolEmpty("no decode worker")]

    def answer(request: v1.GenerateRequest, context: grpc.ServicerContext) -> Iterator[v1.GenerateChunk]:
        if failures:
            fail(context, failures.pop())
        yield from two_tokens(request, context)

    router.answer = answer
    options = "--rate 200 --requests 20 --mix 50:50 --warmup 0 --long-tokens 100 --max-tokens 2"
    assert online.main(["--address", router.address, *options.split(" ")]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["requests"], summary["completed"], summary["errors"]) == (20, 18, 2)
    assert summary["errors_by_kind"] == {"Overloaded": 1, "PoolEmpty": 1}
    assert summary["output_tokens"] == 36
    for figure in ("ttft_ms", "tpot_ms", "itl_ms"):
        assert set(summary[figure]) == {"p50", "p90", "p99"}
    assert {request.sla_class for request in router.requests} == {"interactive", "batch"}
    assert all(request.sampling.ignore_eos for request in router.requests)
