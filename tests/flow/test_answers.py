"""The split pools answer what one process would: same tokens, same counts, whatever else is running."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.flow.cluster import Cluster
from tests.flow.oracle import Oracle


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


def prompts(count: int, seed: int, low: int = 3, high: int = 90) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(10, 250) for _ in range(draw.randrange(low, high))] for _ in range(count)]


def test_int8_kv_through_the_pools_is_token_identical_to_one_process(shared: Cluster, oracle: Oracle) -> None:  # C6
    with shared.client() as client:
        for prompt in prompts(20, seed=1):
            answer = client.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
            assert answer.token_ids == oracle.answer(prompt, 24, ignore_eos=True)


@pytest.mark.parametrize("weights", ["w8a16", "w8a8"])
def test_int8_weights_through_the_pools_are_token_identical_to_one_process(
    deploy: Callable[..., Cluster], tiny_model: Path, weights: str
) -> None:
    cluster, alone = deploy(1, 1, weights=weights), Oracle(tiny_model, weights=weights)
    with cluster.client() as client:
        for prompt in prompts(10, seed=1):
            answer = client.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
            assert answer.token_ids == alone.answer(prompt, 24, ignore_eos=True)
    cluster.assert_baseline()


def test_prefill_in_w8a8_and_decode_in_w8a16_are_paired_and_answer_alike_every_time(
    deploy: Callable[..., Cluster], tiny_model: Path
) -> None:
    cluster = deploy(0, 0)
    cluster.worker("prefill", "prefill-int8", weights="w8a8")
    cluster.worker("decode", "decode-int8", weights="w8a16")
    cluster.wait_ready("prefill-int8", "decode-int8")
    cluster.wait_workers(2)
    prefill = Oracle(tiny_model, weights="w8a8")
    with cluster.client() as client:
        for prompt in prompts(5, seed=1):
            first, second = (
                client.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True).token_ids for _ in range(2)
            )
            assert len(first) == 24
            assert first == second
            assert first[:1] == prefill.answer(prompt, 1, ignore_eos=True)
    cluster.assert_baseline()


def test_200_concurrent_prompts_each_equal_their_solo_run(shared: Cluster, oracle: Oracle) -> None:  # C2
    asked = prompts(200, seed=2)
    with shared.client(timeout_s=100) as client, ThreadPoolExecutor(32) as threads:
        answers = list(
            threads.map(lambda p: client.generate(p, max_tokens=8, temperature=0, ignore_eos=True).token_ids, asked)
        )
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer == oracle.answer(prompt, 8, ignore_eos=True)


def test_the_same_greedy_prompt_under_load_has_one_answer(shared: Cluster) -> None:  # C7
    probe, others = prompts(1, seed=3, low=60)[0], prompts(40, seed=4)
    with shared.client(timeout_s=100) as client, ThreadPoolExecutor(16) as threads:
        noise = [threads.submit(client.generate, p, max_tokens=16, temperature=0.9, seed=7) for p in others]
        answers = [
            threads.submit(client.generate, probe, max_tokens=24, temperature=0, ignore_eos=True) for _ in range(20)
        ]
        distinct = {tuple(answer.result().token_ids) for answer in answers}
        for future in noise:
            future.result()
    assert len(distinct) == 1


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_max_tokens_is_exact(shared: Cluster, oracle: Oracle, max_tokens: int, streaming: bool) -> None:  # P1
    prompt = prompts(1, seed=5)[0]
    with shared.client() as client:
        if streaming:
            with client.stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True) as stream:
                token_ids = [token for chunk in stream for token in chunk.token_ids]
                usage = stream.usage
        else:
            answer = client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
            token_ids, usage = answer.token_ids, answer.usage
            assert answer.finish_reason == "length"
    assert token_ids == oracle.answer(prompt, max_tokens, ignore_eos=True)
    assert usage.completion_tokens == max_tokens
    assert usage.prompt_tokens == len(prompt)


def test_stop_strings_end_the_answer_at_the_first_match(shared: Cluster) -> None:  # P2
    prompt = prompts(1, seed=6)[0]
    with shared.client() as client:
        whole = client.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)
        pieces = [client.detokenize(whole.token_ids[:i]) for i in range(len(whole.token_ids) + 1)]
        first, second = pieces[1], pieces[2]
        cases = [first, second[-max(2, len(second) - len(first) + 1) :], whole.text[7:12], whole.text[-3:]]
        for stop in filter(None, cases):
            answer = client.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True, stop=[stop])
            assert answer.text == whole.text[: whole.text.index(stop)], stop
            assert answer.finish_reason == "stop"
            with client.stream(prompt, max_tokens=40, temperature=0, ignore_eos=True, stop=[stop]) as stream:
                assert "".join(chunk.text for chunk in stream) == answer.text


def test_a_seed_gives_the_same_answer_as_in_one_process(shared: Cluster, oracle: Oracle) -> None:  # P5
    prompt = prompts(1, seed=8)[0]
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 1234, "ignore_eos": True}
    with shared.client() as client:
        answers = {tuple(client.generate(prompt, max_tokens=20, **sampling).token_ids) for _ in range(3)}
    assert answers == {tuple(oracle.answer(prompt, 20, **sampling))}


def test_every_way_to_ask_uses_the_prefill_pool(shared: Cluster) -> None:  # P6
    def prefills() -> float:
        return sum(
            process.metric("twinpool_prefill_requests_total")
            for name, process in shared.processes.items()
            if name.startswith("prefill")
        )

    messages = [{"role": "user", "content": "Hello there"}]
    with shared.client() as client:
        ways = {
            "text": lambda: client.generate("Hello there", max_tokens=4),
            "tokens": lambda: client.generate([11, 12, 13], max_tokens=4),
            "one token": lambda: client.generate([11, 12, 13], max_tokens=1),
            "chat": lambda: client.chat(messages, max_tokens=4),
            "stream": lambda: list(client.stream("Hello there", max_tokens=4)),
            "n": lambda: client.generate("Hello there", max_tokens=4, n=3),
            "echo": lambda: client.generate("Hello there", max_tokens=4, echo=True, logprobs=2),
        }
        for way, ask in ways.items():
            before = prefills()
            ask()
            assert prefills() == before + 1, way


def test_three_answers_to_one_prompt_cost_one_prompt(shared: Cluster, oracle: Oracle) -> None:  # P3
    prompt = prompts(1, seed=9, low=40)[0]

    def computed_and_sent() -> list[float]:
        names = ("twinpool_prefill_prompt_tokens_total", "twinpool_prefill_transfer_rows_total")
        workers = [process for name, process in shared.processes.items() if name.startswith("prefill")]
        return [sum(worker.metric(name) for worker in workers) for name in names]

    with shared.client() as client:
        before = computed_and_sent()
        answer = client.generate(prompt, max_tokens=12, temperature=0, n=3, ignore_eos=True)
        tokens, rows = (now - then for now, then in zip(computed_and_sent(), before, strict=True))
    assert tokens == len(prompt)
    assert rows == 3 * -(-len(prompt) // 16)  # of three layers, blocks of 16 tokens
    assert [choice.token_ids for choice in answer.choices] == [oracle.answer(prompt, 12, ignore_eos=True)] * 3
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 36


def test_echo_and_logprobs_stream_from_the_prompt_on_with_the_first_token(
    shared: Cluster, oracle: Oracle
) -> None:  # P4
    prompt = prompts(1, seed=14, low=20)[0]
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 5}
    with shared.client() as client:
        whole = client.generate(prompt, **options)
        with client.stream(prompt, **options) as stream:
            streamed = [entry for chunk in stream for entry in chunk.logprobs]
    assert [entry.token_id for entry in streamed] == [*prompt, *oracle.answer(prompt, 8, ignore_eos=True)]
    assert streamed[0].logprob is None  # nothing comes before it
    assert all(entry.logprob is not None and len(entry.top) == 5 for entry in streamed[1:])
    for entry in streamed[len(prompt) :]:  # greedy
        assert entry.logprob == max(each.logprob for each in entry.top)
    assert streamed == whole.choices[0].logprobs


def test_preemption_on_the_decode_worker_changes_no_answer(
    deploy: Callable[..., Cluster], oracle: Oracle
) -> None:  # C5
    cluster = deploy(1, 0)
    decode = cluster.worker("decode", "decode-small", memory="140KiB")  # some 40 blocks, an answer takes 10 to 13
    cluster.wait_ready("decode-small")
    cluster.wait_workers(2)
    asked = prompts(12, seed=15, low=30)
    with cluster.client(timeout_s=60) as client, ThreadPoolExecutor(12) as threads:
        calls = [
            threads.submit(client.generate, prompt, max_tokens=120, temperature=0, ignore_eos=True) for prompt in asked
        ]
        for prompt, call in zip(asked, calls, strict=True):
            assert call.result().token_ids == oracle.answer(prompt, 120, ignore_eos=True)
    assert decode.metric("twinpool_decode_preemptions_total") > 0
    cluster.assert_baseline()


def test_metrics_and_timeline_account_for_the_latency(shared: Cluster) -> None:  # S2
    prompt = prompts(1, seed=10, low=80)[0]

    def total(pool: str, metric: str) -> float:
        return sum(p.metric(metric) for name, p in shared.processes.items() if name.startswith(pool))

    names = [
        ("router", "twinpool_router_ttft_seconds_sum"),
        ("prefill", "twinpool_prefill_prompt_tokens_total"),
        ("prefill", "twinpool_prefill_step_seconds_sum"),
        ("prefill", "twinpool_prefill_transfer_bytes_total"),
        ("prefill", "twinpool_prefill_transfer_seconds_sum"),
        ("decode", "twinpool_decode_tokens_total"),
        ("decode", "twinpool_decode_step_seconds_sum"),
    ]
    before = [total(*name) for name in names]
    with shared.client() as client:
        answer = client.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True)
    for name, old in zip(names, before, strict=True):
        assert total(*name) > old, name
    line = answer.timeline
    for part in ("prefill_ms", "transfer_ms", "ttft_ms", "tpot_ms", "decode_ms", "total_ms", "transfer_bytes"):
        assert getattr(line, part) > 0, part
    parts = line.queued_ms + line.reserve_ms + line.prefill_queue_ms + line.prefill_ms
    assert parts <= line.ttft_ms * 1.001 + 0.1
    assert line.ttft_ms + 15 * line.tpot_ms == pytest.approx(line.total_ms, rel=0.05, abs=2.0)
    request = shared.processes["router"].log_records("request")[-1]
    assert request["request_id"] == answer.request_id
    assert request["ttft_ms"] == pytest.approx(line.ttft_ms, abs=0.01)
