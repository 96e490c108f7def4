"""What a prefill worker is asked, what it answers, and the state of one prompt in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.prompt import Prompt
from engine.sampling import Sampled
from kvtransfer import Push
from twinpool.errors import InvalidRequest, TwinpoolError
from twinpool.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to compute. `token_ids` are the user's prompt and, on a resumption, the tokens delivered after it."""

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int  # of token_ids, how many are the user's prompt
    sampling: SamplingParams
    input_class: str  # a key of the scheduler's batch limits
    target: bytes = b""  # where the rows go; empty: nowhere
    first_choice: int = 0
    priority: int = 0  # higher goes first
    timeout_s: float = 60.0  # until the rows must have been acknowledged
    cache_salt: str = ""  # cached prefixes are shared only under the same one
    generate: bool = False  # no target, one choice: this worker goes on until the answer ends

    def validate(self, vocab_size: int, max_context: int) -> None:
        """Raises InvalidRequest naming the field that is wrong."""
        if not 1 <= self.num_prompt_tokens <= len(self.token_ids):
            raise InvalidRequest(
                f"num_prompt_tokens is {self.num_prompt_tokens}: allowed is 1 to {len(self.token_ids)}, the token ids",
                field="num_prompt_tokens",
            )
        if max(self.token_ids) >= vocab_size:
            raise InvalidRequest(
                f"token id {max(self.token_ids)} is not below the vocabulary size {vocab_size}", field="token_ids"
            )
        if len(self.token_ids) >= max_context:
            raise InvalidRequest(
                f"{len(self.token_ids)} tokens leave no room for an answer in a context of {max_context}",
                field="prompt",
            )
        self.sampling.validate(vocab_size, max_context, self.num_prompt_tokens)
        if self.generate and (self.target or self.sampling.n > 1):
            raise InvalidRequest("generate is set: allowed are n = 1 and no transfer_target", field="generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """The first token of every choice, in order; the prompt is computed."""

    tokens: list[Sampled]
    cached_tokens: int
    queue_ms: float  # received until admitted to a batch
    prefill_ms: float  # admitted until sampled
    prompt_logprobs: list[Sampled]  # one per prompt token when asked for, the first without a value
    compute_ms: float = 0.0  # its share, by tokens, of the steps that computed it


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """The target has acknowledged every row."""

    bytes: int
    rows: int
    transfer_ms: float  # first rows sent until acknowledged
    transfer_wait_ms: float  # part of it after the first token was sampled


@dataclass(frozen=True, slots=True)
class NextToken:
    """One token more of an answer that this worker generates."""

    choice: int
    token: Sampled


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request; `error` says why it failed, None when it did not."""

    error: TwinpoolError | None = None


Event = FirstTokens | Transferred | NextToken | Finished


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt inside the worker, its device thread's once `submit` made it; times are those of time.monotonic()."""

    request: Request
    emit: Callable[[Event], None]  # called by the device thread
    received_at: float
    output: list[int] = field(default_factory=list)  # tokens generated here; the last is not in the cache yet
    order: tuple[int, int] = (0, 0)  # (-priority, arrival), as the scheduler says
    block_ids: list[int] = field(default_factory=list)  # one reference each; the prompt's blocks once admitted
    state: int | None = None  # its row of the regions of sequences, where the model has such, once admitted
    num_cached: int = 0  # tokens taken from the prefix cache
    num_computed: int = 0  # tokens in the cache, cached ones included
    num_put: int = 0  # blocks handed to the push
    admitted_at: float = 0.0
    sampled_at: float = 0.0
    compute_s: float = 0.0  # its share, by tokens, of the steps so far
    push: Push | None = None
    prompt_logprobs: list[Sampled] = field(default_factory=list)
    ended: bool = False  # Finished was emitted, or nobody listens any more

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) + len(self.output)

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids, *self.output] if self.output else self.request.token_ids

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def prompt(self) -> Prompt:
        request = self.request
        return Prompt(
            token_ids=self.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            choices=range(request.first_choice, request.first_choice + request.sampling.n),
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        return not self.output and self.request.sampling.echo and self.request.sampling.logprobs is not None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens start .. end - 1 of a prompt, or of the answer after it, computed in one step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_tokens
