"""Between protobuf messages and the plain values behind them, for the `server.py` of each process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twinpool.sampling import SamplingParams
from twinpool.v1.router_pb2 import Sampling, TopLogprob
from twinpool.v1.worker_pb2 import SampledToken

_OPTIONAL = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "logprobs", "n"),
)


def sampling_from_proto(message: Sampling) -> SamplingParams:
    """Absent fields get the defaults of SamplingParams, which are those that the proto states."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SamplingParams(
        **given,
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        echo=message.echo,
    )


def sampling_to_proto(params: SamplingParams) -> Sampling:
    optional: dict[str, Any] = {name: getattr(params, name) for name in _OPTIONAL}  # None leaves a field absent
    return Sampling(
        **optional,
        ignore_eos=params.ignore_eos,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        echo=params.echo,
    )


def token_to_proto(
    token_id: int, logprob: float | None, top: Iterable[tuple[int, float]] | None, finish_reason: int
) -> SampledToken:
    """A token without a logprob (none was asked for, or the first of a prompt) leaves the field at 0."""
    return SampledToken(
        token_id=token_id,
        logprob=logprob if logprob is not None else 0.0,
        top=[TopLogprob(token_id=each, logprob=value) for each, value in top or ()],
        finish_reason=finish_reason,  # type: ignore[arg-type]  # the enum's numbers are FinishReason's
    )
