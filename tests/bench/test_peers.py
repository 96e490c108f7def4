"""The comparison with peers: its arithmetic on cases worked out by hand, its errors, and a whole run on fakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from bench import peer_measures, peers
from bench.openai_client import OpenAIClient
from bench.peer_measures import Load, Search, Side, Sizes, alone, burst, decode_speed, prefill_speed, steady
from bench.report import Outcome
from tests.bench.fake_openai import MODEL, FakeOpenAI
from tests.twinpool.fake_router import FakeRouter, chunk
from twinpool import errors
from twinpool.v1 import router_pb2 as v1

SMALL = Sizes(decode_prompt=40, decode_answer=6, prefills=((2, 50), (1, 80)), short=40, long=120, answer=4)


@pytest.fixture
def peer() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRouter]:
    fake = FakeRouter()
    fake.answer = as_many_as_asked
    monkeypatch.setattr(peers, "SIZES", SMALL)
    yield fake
    fake.close()


def as_many_as_asked(request: v1.GenerateRequest, _context: grpc.ServicerContext) -> Iterator[v1.GenerateChunk]:
    count = request.sampling.max_tokens
    for number in range(count):
        yield chunk("a", 7, finish=v1.FINISH_REASON_LENGTH if number == count - 1 else 0)
    usage = v1.Usage(prompt_tokens=len(request.text.encode()), completion_tokens=count)
    yield v1.GenerateChunk(request_id="req-1", usage=usage)


def outcome(*token_s: float, prompt_tokens: int = 0) -> Outcome:
    return Outcome(shape="burst", sla_class="batch", due_s=0.0, token_s=list(token_s), prompt_tokens=prompt_tokens)


def test_steady_counts_while_all_decode() -> None:
    assert steady([outcome(1.0, 1.5, 2.0, 2.5)]) == pytest.approx(2.0)
    # Both decode from 2.0 to 4.0: the first one's tokens at 3 and 4, the second one's at 2.5 to 4.
    assert steady([outcome(1, 2, 3, 4), outcome(2, 2.5, 3, 3.5, 4, 4.5)]) == pytest.approx(6 / 2)
    assert steady([outcome(1, 2), outcome(3, 4)]) is None


def test_the_search_halves_towards_the_largest_rate_in_target() -> None:
    search = Search(most=8.0)
    rates = []
    for _ in range(4):
        rates.append(search.rate)
        search.note(1.0 if search.rate <= 5.2 else 0.5)
    assert rates == [4.0, 6.0, 5.0, 5.5]
    assert search.kept == 5.0
    never = Search(most=8.0)
    for _ in range(3):
        never.note(0.89)
    assert never.kept == 0.0


def test_ratios_are_against_every_peer_that_has_a_figure() -> None:
    def mixed(p99: float) -> dict[str, dict[str, float]]:
        return {"itl_ms": {"p99": p99}}

    figures = {
        "decode_tok_s_1": {"ours": 60.0, "a": 20.0, "b": 30.0},
        "decode_tok_s_8": {"ours": 60.0, "a": None, "b": None},
        "mixed_0.6": {"rate_rps": 1.0, "ours": mixed(50.0), "a": mixed(400.0), "b": mixed(200.0)},
    }
    assert peers.ratios(figures, ["a", "b"]) == {
        "decode_tok_s_1": {"ours": {"a": 3.0, "b": 2.0}},
        "mixed_0.6_itl_p99": {"ours": {"a": 0.125, "b": 0.25}},
    }


def test_a_share_of_the_load_is_in_target_only_with_both() -> None:
    slow_start, slow_steps = outcome(1.2, 1.21), outcome(0.5, 0.6)
    good = outcome(0.9, 0.94)
    for each in (slow_start, slow_steps, good):
        each.end_s = each.token_s[-1]
    assert peer_measures.summary([slow_start, slow_steps, good, good])["in_target"] == 0.5


async def test_a_peer_streams_answers_of_the_length_asked_for(peer: FakeOpenAI) -> None:
    peer.gap_s = 0.01
    async with OpenAIClient("fake", peer.url, body={"min_tokens": None, "top_k": 1}) as client:
        await client.connect()
        assert client.model == MODEL
        side = Side(name="fake", client=client, ours=False)
        speed = await decode_speed(side, ["one", "two"], Sizes(decode_answer=20))
    assert speed is not None
    assert 0 < speed <= 2 / 0.01 * 1.05
    assert [body["max_tokens"] for body in peer.bodies] == [1, 1, 20, 20]  # each prompt is primed
    assert {body["prompt"] for body in peer.bodies} == {"one", "two"}
    assert all(body["ignore_eos"] and body["top_k"] == 1 and "min_tokens" not in body for body in peer.bodies)


async def test_prefill_speed_is_tokens_until_the_last_prompt_is_done(peer: FakeOpenAI) -> None:
    peer.gap_s = 0.1
    async with OpenAIClient("fake", peer.url, model=MODEL) as client:
        speed = await prefill_speed(Side(name="fake", client=client, ours=False), ["a" * 300, "b" * 300], 300)
    assert 0 < speed <= 600 / 0.1


@pytest.mark.parametrize(("with_ids", "with_usage"), [(False, True), (False, False), (True, False)])
async def test_lengths_are_known_without_token_ids_or_usage(peer: FakeOpenAI, with_ids: bool, with_usage: bool) -> None:
    peer.merge, peer.with_ids, peer.with_usage = 3, with_ids, with_usage
    async with OpenAIClient("fake", peer.url, model=MODEL) as client:
        (got,) = await burst(Side(name="fake", client=client, ours=False), ["text"], 8)
    assert len(got.token_s) == 8
    assert got.prompt_tokens == (4 if with_usage else 0)


@pytest.mark.parametrize(
    ("change", "expected", "message"),
    [
        ({"short_by": 2}, errors.Internal, "fake.*3 tokens instead of 5.*--peer-body"),
        ({"status": 400}, errors.InvalidRequest, "fake.*HTTP status 400.*--peer-body fake="),
        ({"status": 401}, errors.Unauthenticated, "fake.*HTTP status 401"),
        ({"status": 500}, errors.Internal, "fake.*HTTP status 500.*log"),
        ({"status": 503}, errors.Overloaded, "fake.*HTTP status 503.*lower the load"),
        ({"error_event": True}, errors.Internal, "fake.*out of memory"),
    ],
)
async def test_what_a_peer_does_wrong_is_an_error_that_names_it(
    peer: FakeOpenAI, change: dict[str, object], expected: type[errors.TwinpoolError], message: str
) -> None:
    for name, value in change.items():
        setattr(peer, name, value)
    async with OpenAIClient("fake", peer.url, model=MODEL) as client:
        with pytest.raises(expected, match=message):
            await burst(Side(name="fake", client=client, ours=False), ["text"], 5)


async def test_a_slow_peer_runs_into_the_timeout(peer: FakeOpenAI) -> None:
    peer.gap_s = 5.0
    async with OpenAIClient("fake", peer.url, model=MODEL, timeout_s=0.1) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"fake.*--timeout"):
            await burst(Side(name="fake", client=client, ours=False), ["text"], 5)


async def test_a_model_that_is_not_served_is_an_error(peer: FakeOpenAI) -> None:
    async with OpenAIClient("fake", peer.url, model="large") as client:
        with pytest.raises(errors.UnknownModel, match=r"serves tiny, not large.*--peer-model"):
            await client.connect()


async def test_a_prefix_cache_that_helped_is_an_error(peer: FakeOpenAI) -> None:
    peer.cached_tokens = 64
    async with OpenAIClient("fake", peer.url, model=MODEL) as client:
        with pytest.raises(errors.InvalidRequest, match=r"fake: 64 tokens.*prefix cache"):
            await prefill_speed(Side(name="fake", client=client, ours=False), ["text"], 4)


async def test_failures_under_load_are_counted_unless_nothing_is_answered(peer: FakeOpenAI) -> None:
    load = Load(requests=4, mix=(1, 1), sizes=SMALL, seed=0)
    arrivals = load.arrivals(1000.0, 4)
    async with OpenAIClient("fake", peer.url, model=MODEL) as client:
        side = Side(name="fake", client=client, ours=False)
        got = peer_measures.summary(await peer_measures.mixed(side, arrivals, ["text"] * 4, SMALL))
        assert (got["requests"], got["errors"], got["in_target"]) == (4, 0, 1.0)
        peer.status = 503
        with pytest.raises(errors.Overloaded, match="fake"):
            await peer_measures.mixed(side, arrivals, ["text"] * 4, SMALL)


def test_a_peer_stands_still_while_another_is_measured() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        one = Side(name="one", client=OpenAIClient("one", ""), ours=False, pids=(process.pid,))
        two = Side(name="two", client=OpenAIClient("two", ""), ours=False)
        with alone(two, [one, two]):
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            with alone(one, [one, two]):
                pass
        assert os.WIFCONTINUED(os.waitpid(process.pid, os.WCONTINUED)[1])
        process.send_signal(signal.SIGKILL)
    with pytest.raises(errors.ConfigError, match=f"--pause: process {process.pid}"), alone(two, [one, two]):
        pass


def test_a_run_that_is_ended_lets_peers_go_on(router: FakeRouter, peer: FakeOpenAI) -> None:
    def slow(request: v1.GenerateRequest, context: grpc.ServicerContext) -> Iterator[v1.GenerateChunk]:
        time.sleep(1)
        yield from as_many_as_asked(request, context)

    router.answer = slow
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        options = ["--ours", router.address, "--peer", f"fake={peer.url}", "--pause", f"fake={process.pid}"]
        with subprocess.Popen([sys.executable, "-m", "bench.peers", *options], stderr=subprocess.PIPE) as run:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            run.terminate()
            assert run.wait(20) == 128 + signal.SIGTERM
        assert os.WIFCONTINUED(os.waitpid(process.pid, os.WCONTINUED)[1])
        process.kill()


def test_a_run_measures_every_side_and_ends_in_one_json_line(
    router: FakeRouter, peer: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--rounds 2 --batches 1,2 --requests 10 --trials 2 --seconds 0.1 --one-at-a-time alone"
    sides = ["--ours", router.address, "--peer", f"fake={peer.url}", "--peer", f"alone={peer.url}"]
    assert peers.main([*sides, *options.split(" ")]) == 0
    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    assert {"commit", "cpu", "cores", "figures", "of_peers"} <= set(result)
    figures = result["figures"]
    for measure in ("decode_tok_s_1", "decode_tok_s_2", "prefill_tok_s_2x50", "prefill_tok_s_1x80", "saturation_rps"):
        assert figures[measure]["ours"] > 0
        assert figures[measure]["fake"] > 0
    assert figures["decode_tok_s_2"]["alone"] is None
    best = max(figures["saturation_rps"][name] for name in ("fake", "alone"))
    for fraction in ("0.6", "1"):
        mixed = figures[f"mixed_{fraction}"]
        assert mixed["rate_rps"] == pytest.approx(float(fraction) * best, abs=0.001)
        assert {"p50", "p99"} <= set(mixed["ours"]["itl_ms"])
        assert mixed["fake"]["errors"] == 0
    assert set(figures["goodput_rps"]) == {"ours", "fake", "alone"}
    assert [len(trials) for trials in figures["goodput_trials"].values()] == [2, 2, 2]
    speeds = figures["prefill_tok_s_1x80"]
    of_fake = result["of_peers"]["prefill_tok_s_1x80"]["ours"]["fake"]
    assert of_fake == pytest.approx(speeds["ours"] / speeds["fake"], rel=0.01)
    ours = [request.text for request in router.requests if request.sampling.max_tokens == SMALL.answer]
    theirs = [body["prompt"] for body in peer.bodies if body["max_tokens"] == SMALL.answer]
    assert len(set(ours)) == len(ours)  # no prompt is sent twice
    assert set(ours[-40:]) & set(theirs)  # and both sides get the same
    assert any(line.startswith("decode_tok_s_1 ") for line in printed)
    assert any(line.strip().startswith("ours: ") and " x fake" in line for line in printed)


def test_other_counts_of_the_same_prompt_are_another_tokenizer(
    router: FakeRouter, peer: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.extra_prompt_tokens = 1
    assert peers.main(["--ours", router.address, "--peer", f"fake={peer.url}"]) == 2
    assert "same tokenizer everywhere" in capsys.readouterr().err


def test_a_peer_that_cannot_be_reached_is_named(router: FakeRouter, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--ours", router.address, "--peer", "gone=http://127.0.0.1:1/v1"]) == 2
    message = capsys.readouterr().err
    assert "peer gone: http://127.0.0.1:1/v1 cannot be reached" in message
    assert "start the server, or correct --peer" in message


def test_options_of_a_peer_that_is_not_given_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parse(["--local", "--peer", "a=http://x/v1", "--pause", "b=1"])
    assert "no --peer is called b" in capsys.readouterr().err
