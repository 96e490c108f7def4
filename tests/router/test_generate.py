"""What a client gets from a healthy deployment: one path for unary and streaming, whatever is asked for."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import Deployment, Fault, letters
from tests.router.conftest import Api, Start, eventually
from twinpool.v1 import router_pb2 as v1

STOP, LENGTH = v1.FINISH_REASON_STOP, v1.FINISH_REASON_LENGTH
PROMPT = list(range(40, 80))


def answer(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    return letters(prompt, choice)[:count]


@pytest.fixture
async def pair(api: Api, fakes: Deployment) -> Deployment:
    await fakes.prefill()
    await fakes.decode()
    await api.ready(2)
    return fakes


async def test_unary_and_streaming_give_the_same_answer(api: Api, pair: Deployment) -> None:
    whole = await api.generate(PROMPT, max_tokens=30)
    (choice,) = whole.choices
    assert list(choice.token_ids) == answer(PROMPT, 30)
    assert choice.text == bytes(answer(PROMPT, 30)).decode()
    assert choice.finish_reason == LENGTH
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (40, 30)
    chunks = [chunk async for chunk in api.stream(PROMPT, max_tokens=30)]
    deltas = [delta for chunk in chunks for delta in chunk.choices]
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [token for delta in deltas for token in delta.token_ids] == list(choice.token_ids)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [LENGTH]
    assert chunks[-1].usage == whole.usage
    assert not any(chunk.HasField("usage") or chunk.HasField("timeline") for chunk in chunks[:-1])


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_max_tokens_is_exact(api: Api, pair: Deployment, max_tokens: int) -> None:
    result = await api.generate(PROMPT, max_tokens=max_tokens)
    assert list(result.choices[0].token_ids) == answer(PROMPT, max_tokens)
    assert result.choices[0].finish_reason == LENGTH


async def test_one_token_needs_no_decode_worker(api: Api, pair: Deployment) -> None:
    prefill, decode = pair.workers
    result = await api.generate(PROMPT, max_tokens=1)
    assert len(prefill.requests) == 1
    assert prefill.requests[0].transfer_target == b""
    assert not decode.submits
    assert (result.timeline.prefill_worker, result.timeline.decode_worker) == ("p0", "")


async def test_every_method_asks_the_prefill_pool_once(api: Api, pair: Deployment) -> None:
    prefill = pair.workers[0]
    await api.generate("hello", max_tokens=3)
    await api.generate([5, 6], max_tokens=3, n=3)
    chat = v1.Chat(messages=[v1.ChatMessage(role="user", content="hi")])
    message = v1.GenerateRequest(chat=chat, sampling=v1.Sampling(max_tokens=3))
    await api.call("Generate", message)
    assert [chunk async for chunk in api.stream("hello", max_tokens=3)]
    assert len(prefill.requests) == 4
    expected = b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    rendered = bytes(t if t < 256 else 0 for t in prefill.requests[2].token_ids)
    for text, byte in ((b"<|im_start|>", b"\0"), (b"<|im_end|>", b"\0")):
        expected = expected.replace(text, byte)
    assert rendered == expected


async def test_first_token_is_delivered_before_the_transfer_ends(api: Api, pair: Deployment) -> None:
    pair.workers[0].faults.append(Fault.SLOW_TRANSFER)
    stream = api.stream(PROMPT, max_tokens=9)
    first = await anext(stream)
    assert list(first.choices[0].token_ids) == answer(PROMPT, 1)
    await stream.aclose()


async def test_tokens_that_overtake_the_first_one_wait_for_it(api: Api, pair: Deployment) -> None:
    pair.workers[0].faults.append(Fault.LATE_FIRST)
    result = await api.generate(PROMPT, max_tokens=9)
    assert list(result.choices[0].token_ids) == answer(PROMPT, 9)


async def test_choices_share_one_prefill(api: Api, pair: Deployment) -> None:
    pair.workers[0].cached_tokens = 16
    result = await api.generate(PROMPT, max_tokens=12, n=3)
    assert [list(choice.token_ids) for choice in result.choices] == [answer(PROMPT, 12, i) for i in range(3)]
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    usage = result.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (40, 16, 36)
    assert len(pair.workers[0].requests) == 1


async def test_logprobs_and_echo(api: Api, pair: Deployment) -> None:
    result = await api.generate([72, 105], max_tokens=3, logprobs=2, echo=True)
    (choice,) = result.choices
    expected = [72, 105, *answer([72, 105], 3)]
    assert list(choice.token_ids) == expected
    assert choice.text == bytes(expected).decode()
    assert [entry.token_id for entry in choice.logprobs] == expected
    assert [entry.text for entry in choice.logprobs] == [bytes([token]) for token in expected]
    assert not choice.logprobs[0].HasField("logprob")
    assert choice.logprobs[1].logprob == -105 / 8
    assert [top.text for top in choice.logprobs[2].top] == [bytes([expected[2]]), bytes([expected[2] + 1])]
    assert result.usage.completion_tokens == 3


async def test_every_choice_echoes_the_prompt_with_its_logprobs(api: Api, pair: Deployment) -> None:
    result = await api.generate([72, 105], max_tokens=3, logprobs=2, echo=True, n=3)
    first, *others = [list(choice.logprobs) for choice in result.choices]
    assert [entry.token_id for entry in first[:2]] == [72, 105]
    for choice, entries in enumerate(others, start=1):
        assert entries[:2] == first[:2]
        assert [entry.token_id for entry in entries[2:]] == answer([72, 105], 3, choice)


async def test_streamed_first_token_has_logprobs(api: Api, pair: Deployment) -> None:
    stream = api.stream(PROMPT, max_tokens=3, logprobs=5)
    first = await anext(stream)
    assert [entry.token_id for entry in first.choices[0].logprobs] == list(first.choices[0].token_ids)
    assert first.choices[0].token_ids[0] == answer(PROMPT, 1)[0]
    assert len(first.choices[0].logprobs[0].top) == 5
    await stream.aclose()


async def test_echo_without_logprobs(api: Api, pair: Deployment) -> None:
    result = await api.generate("Hi", max_tokens=2, echo=True)
    assert result.choices[0].text == "Hi" + bytes(answer([72, 105], 2)).decode()
    assert not result.choices[0].logprobs


async def test_stop_token_and_end_of_sequence_are_counted_and_not_shown(api: Api, pair: Deployment) -> None:
    full = answer(PROMPT, 20)
    stop = full[6]
    cut = full.index(stop)
    result = await api.generate(PROMPT, max_tokens=20, stop_token_ids=[stop])
    (choice,) = result.choices
    assert list(choice.token_ids) == full[: cut + 1]
    assert choice.text == bytes(full[:cut]).decode()
    assert choice.finish_reason == STOP


@pytest.mark.parametrize("at", [0, 1, 7])
async def test_stop_string_ends_its_choice_and_the_worker_is_told(api: Api, pair: Deployment, at: int) -> None:
    text = bytes(answer(PROMPT, 40)).decode()
    stop = text[at : at + 2]
    result = await api.generate(PROMPT, max_tokens=40, stop=[stop])
    assert result.choices[0].text == text[: text.index(stop)]
    assert result.choices[0].finish_reason == STOP


async def test_stop_string_of_one_choice_leaves_the_others_running(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    decode = await fakes.decode(step_s=0.002)
    await api.ready(2)
    texts = [bytes(answer(PROMPT, 40, choice)).decode() for choice in range(2)]
    stop = next(texts[0][i : i + 3] for i in range(5, 20) if texts[0][i : i + 3] not in texts[1])
    result = await api.generate(PROMPT, max_tokens=40, n=2, stop=[stop])
    assert result.choices[0].text == texts[0][: texts[0].index(stop)]
    assert result.choices[0].finish_reason == STOP
    assert result.choices[1].text == texts[1]
    assert result.choices[1].finish_reason == LENGTH
    assert [cancel.choice for cancel in decode.cancels if cancel.HasField("choice")] == [0]


async def test_stop_string_cannot_match_before_min_tokens(api: Api, pair: Deployment) -> None:
    text = bytes(answer(PROMPT, 40)).decode()
    stop = text[3]
    second = text.find(stop, 8)
    result = await api.generate(PROMPT, max_tokens=40, min_tokens=8, stop=[stop])
    assert result.choices[0].text == (text if second < 0 else text[:second])


async def test_timeline_accounts_for_the_time(api: Api, fakes: Deployment) -> None:
    await fakes.prefill()
    await fakes.decode(step_s=0.002)
    await api.ready(2)
    line = (await api.generate(PROMPT, max_tokens=16)).timeline
    assert (line.prefill_worker, line.decode_worker, line.attempts) == ("p0", "d0", 1)
    assert (line.sla_class, line.input_class) == ("interactive", "short")
    assert (line.prefill_queue_ms, line.prefill_ms, line.decode_ms) == (0.25, 0.5, 2.0)
    assert (line.transfer_ms, line.transfer_wait_ms, line.transfer_bytes) == (3.0, 1.0, 4096)
    assert line.queued_ms + line.reserve_ms <= line.ttft_ms
    assert line.ttft_ms + 15 * line.tpot_ms == pytest.approx(line.total_ms)


async def test_classes_travel_to_the_workers(api: Api, pair: Deployment) -> None:
    prefill, decode = pair.workers
    result = await api.generate([7] * 500, max_tokens=2, sla_class="batch", priority=3)
    assert result.timeline.input_class == "short"  # the default threshold is 512
    request, submit = prefill.requests[0], decode.submits[0]
    assert (request.sla_class, request.input_class, request.priority) == ("batch", "short", 3)
    assert (submit.sla_class, submit.priority, submit.tpot_target_ms) == ("batch", 3, 0)
    await api.generate([7], max_tokens=2)
    assert decode.submits[1].tpot_target_ms == 100
    assert 0 < decode.submits[1].timeout_ms <= 600_000
    assert decode.submits[0].sampling.HasField("seed")


async def test_long_inputs_are_classified(start: Start) -> None:
    api = await start(long_input=10)
    async with Deployment(api.address) as fakes:
        prefill = await fakes.prefill()
        await fakes.decode()
        await api.ready(2)
        for length, input_class in ((9, "short"), (10, "long")):
            result = await api.generate([7] * length, max_tokens=2)
            assert result.timeline.input_class == prefill.requests[-1].input_class == input_class


async def test_two_hundred_at_once_each_get_their_own_answer(start: Start) -> None:
    api = await start(policy="least_loaded")  # it knows nothing of speed, which a busy machine makes uneven
    async with Deployment(api.address) as fakes:
        for name in ("0", "1"):
            await fakes.prefill("p" + name)
            await fakes.decode("d" + name)
        await api.ready(4)
        prompts = [[(7 * i + j) % 256 for j in range(3 + i % 20)] for i in range(200)]
        results = await asyncio.gather(*(api.generate(prompt, max_tokens=12) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.choices[0].token_ids) == answer(prompt, 12)
        shares = [len(worker.submits) for worker in fakes.workers if worker.name.startswith("d")]
        assert max(shares) <= 1.5 * 100
    assert {result.timeline.prefill_worker for result in results} == {"p0", "p1"}


async def test_tokenize_detokenize_and_models(api: Api) -> None:
    tokens = await api.call("Tokenize", v1.TokenizeRequest(text="né"))
    assert list(tokens.token_ids) == list("né".encode())
    text = await api.call("Detokenize", v1.DetokenizeRequest(token_ids=[72, 257, 105]))
    assert text.text == "Hi"
    text = await api.call("Detokenize", v1.DetokenizeRequest(token_ids=[72, 257], keep_special_tokens=True))
    assert text.text == "H<|im_start|>"
    (card,) = (await api.call("ListModels", v1.ListModelsRequest())).models
    assert (card.name, card.context_length, card.vocab_size, card.architecture) == ("fake", 512, 264, "llama")


async def test_pools_show_both_workers(api: Api, pair: Deployment) -> None:
    pair.workers[1].rows_free = 77
    pools = None

    async def reported() -> bool:
        nonlocal pools
        pools = await api.call("GetPools", v1.GetPoolsRequest())
        return pools.workers[1].rows_free == 77

    await eventually(reported)
    prefill, decode = pools.workers
    assert (prefill.worker_id, prefill.pool, prefill.state) == ("p0", v1.POOL_PREFILL, v1.WORKER_STATE_READY)
    assert (decode.worker_id, decode.pool, decode.rows_total) == ("d0", v1.POOL_DECODE, 1000)
    assert (pools.queued, pools.running) == (0, 0)
