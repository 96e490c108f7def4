"""What a caller can ask for: the keyword arguments of every generating call, and the message they become."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, cast

from twinpool import errors
from twinpool.v1 import router_pb2 as v1


class Message(TypedDict):
    """One turn of a conversation."""

    role: str  # "system", "user", "assistant": whatever the model's template knows
    content: str


Conversation: TypeAlias = Sequence[Message] | Sequence[Mapping[str, str]]  # plain dicts do as well
Prompt: TypeAlias = str | Sequence[int] | Conversation  # text, token ids, or a conversation


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn; what is left out keeps the server's default."""

    temperature: float  # 0 to 2, default 1; 0 is greedy
    top_p: float  # over 0 to 1, default 1
    top_k: int  # 0 (off, default) or the number of candidates kept
    min_p: float  # 0 (off, default) to 1: keeps tokens with p >= min_p * p_max
    repetition_penalty: float  # over 0, default 1 (off); over prompt and output tokens
    presence_penalty: float  # -2 to 2, default 0; over output tokens
    frequency_penalty: float  # -2 to 2, default 0; over output tokens
    seed: int  # same seed, same answer
    max_tokens: int  # at least 1; default: the model's context length less the prompt
    min_tokens: int  # default 0
    ignore_eos: bool  # go on past the model's end-of-sequence tokens
    stop: str | Sequence[str]  # at most 16; the answer ends before the first occurrence of any
    stop_token_ids: Sequence[int]  # at most 64
    logprobs: int  # 0 to 20: the chosen token's, and this many alternatives
    n: int  # answers to the one prompt, 1 (default) to 16
    echo: bool  # the answer starts with the prompt


class RequestOptions(SamplingOptions, total=False):
    """Sampling, and how the request is treated."""

    model: str  # a name from models(); default: the only model served
    request_id: str  # unique while it runs; default: drawn by the router
    sla_class: str  # a class of the router's config; default: its default class
    priority: int  # -1000 to 1000, higher goes first within a class; default 0
    ttft_target_ms: float  # 1 to 3,600,000, arrival to first token; default: the class's
    tpot_target_ms: float  # 1 to 60,000, mean time between tokens; default: the class's
    tenant: str  # whose share of the queue it takes; default: by metadata or API key
    cache_salt: str  # cached prefixes are shared only under the same one; default: with all
    deadline_s: float  # from the call to the last token, retries included; default: the client's timeout_s


_OWN_FIELDS = (
    *("model", "request_id", "sla_class", "priority"),
    *("ttft_target_ms", "tpot_target_ms", "tenant", "cache_salt"),
)
_REPEATED = ("stop", "stop_token_ids", "token_ids", "ids")


def generate_request(prompt: Prompt, options: RequestOptions) -> v1.GenerateRequest:
    """Raises InvalidRequest naming the field when a value has the wrong type or cannot be sent."""
    values: dict[str, Any] = dict(options)
    request = v1.GenerateRequest()
    if (deadline_s := values.pop("deadline_s", None)) is not None:
        request.deadline_ms = _milliseconds("deadline_s", deadline_s)
    for name in SamplingOptions.__annotations__:
        if (value := values.pop(name, None)) is not None:
            _set(request.sampling, name, value)
    for name in _OWN_FIELDS:
        if (value := values.pop(name, None)) is not None:
            _set(request, name, value)
    if values:
        raise TypeError(
            f"unknown option {', '.join(sorted(values))}; known: {', '.join(RequestOptions.__annotations__)}"
        )
    _set_prompt(request, prompt)
    return request


def tokenize_request(prompt: str | Conversation, model: str, special_tokens: bool) -> v1.TokenizeRequest:
    request = v1.TokenizeRequest(model=model, no_special_tokens=not special_tokens)
    _set_prompt(request, prompt)
    return request


def detokenize_request(token_ids: Sequence[int], model: str, special_tokens: bool) -> v1.DetokenizeRequest:
    request = v1.DetokenizeRequest(model=model, keep_special_tokens=special_tokens)
    _set(request, "token_ids", token_ids)
    return request


def conversation(messages: str | Conversation) -> Conversation:
    """`messages`, or a question as the one message of a new conversation."""
    return [Message(role="user", content=messages)] if isinstance(messages, str) else messages


def _set_prompt(request: v1.GenerateRequest | v1.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt)
        return
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise errors.InvalidRequest(
            f"prompt is a {type(prompt).__name__}; it must be text, a list of token ids, or a list of messages "
            'such as {"role": "user", "content": "Hello"}',
            field="prompt",
        )
    items = list(prompt)
    if items and isinstance(items[0], Mapping):
        for message in cast("list[Message]", items):
            _add_message(request.chat, message)
    elif isinstance(request, v1.GenerateRequest):
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", items)
    else:
        raise errors.InvalidRequest("only text or a list of messages can be tokenized", field="prompt")


def _milliseconds(name: str, seconds: float) -> int:
    if not isinstance(seconds, int | float) or not 0 < seconds < 4e6:
        raise errors.InvalidRequest(
            f"{name} is {seconds!r}; it must be a number of seconds over 0, and under 4,000,000", field=name
        )
    return max(1, int(seconds * 1000))


def _add_message(chat: v1.Chat, message: Message) -> None:
    try:
        chat.messages.add(role=message["role"], content=message["content"])
    except (KeyError, TypeError, ValueError) as error:
        raise errors.InvalidRequest(
            f'messages must have a "role" and a "content" each, both text (UTF-8): {error!r}', field="messages"
        ) from error


def _set(message: Any, name: str, value: Any) -> None:
    try:
        if name == "stop" and isinstance(value, str):
            value = [value]
        if name in _REPEATED:
            getattr(message, name).extend(value if name == "stop" else [operator.index(item) for item in value])
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        field = {"ids": "token_ids", "text": "prompt"}.get(name, name)
        raise errors.InvalidRequest(f"{field} cannot be sent: {error}", field=field) from error
