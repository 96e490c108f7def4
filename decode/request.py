"""What a decode worker is asked, what it answers, and the state of one request and of each of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Protocol

from engine.prompt import Prompt
from engine.sampling import Sampled
from kvtransfer import Reservation
from twinpool.errors import InvalidRequest, TwinpoolError
from twinpool.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to go on from. `token_ids` are the user's and, on a resumption, the tokens delivered after it."""

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int  # of token_ids, how many are the user's prompt
    sampling: SamplingParams
    first_choice: int = 0
    priority: int = 0  # higher goes first
    timeout_s: float = 60.0  # from now until the rows must have arrived
    tpot_target_s: float = 0.0  # 0: none
    sla_class: str = ""
    max_batch: int = 0  # most sequences in a step while this request runs; 0: the worker's own limit
    local_prefill: bool = False  # this worker computes the prompt; no rows come from elsewhere

    @property
    def choices(self) -> range:
        return range(self.first_choice, self.first_choice + self.sampling.n)

    @property
    def prompt(self) -> Prompt:
        return Prompt(
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            choices=self.choices,
        )

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
                f"{len(self.token_ids)} tokens leave no room for an answer in the {max_context} that this worker holds",
                field="prompt",
            )
        self.sampling.validate(vocab_size, max_context, self.num_prompt_tokens)


class Reason(IntEnum):
    """Why a request ended here; the numbers are those of DecodeEnded.Reason."""

    FINISHED = 1
    CANCELLED = 2
    REJECTED = 3
    TRANSFER_FAILED = 4
    PREEMPTED = 5
    FAILED = 6


@dataclass(frozen=True, slots=True)
class Reserved:
    """Rows are set aside for the prompt and its first growth."""

    target: bytes  # empty: the prompt is computed here


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """The prompt was computed here: the first token of every choice, in order."""

    tokens: list[Sampled]
    queue_ms: float  # received until rows were free
    prefill_ms: float  # until sampled; steps of the running batch lie in between
    compute_ms: float  # part of it that was spent on this prompt
    prompt_logprobs: list[Sampled]  # one per prompt token when asked for, the first without a value


@dataclass(frozen=True, slots=True)
class Token:
    choice: int
    token: Sampled


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a request; its rows are free."""

    reason: Reason
    error: TwinpoolError | None = None
    decode_ms: float = 0.0  # commit received to last token


Event = Reserved | FirstTokens | Token | Ended


@dataclass(frozen=True, slots=True)
class Output:
    """One event and whose it is."""

    request_id: str
    attempt: int
    event: Event


class Session(Protocol):
    """Who submitted a request and gets its events: one router's stream."""

    def deliver(self, outputs: list[Output]) -> None:
        """All events of one step, in order. Called by the device thread; must not block or raise."""


class Phase(Enum):
    WAITING = auto()  # for rows
    RESERVED = auto()  # rows are set aside; waits for the transfer
    PREFILLING = auto()  # rows are set aside; the prompt is computed here
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Generation:
    """One request inside the worker. Written by the device thread only; times are those of time.monotonic()."""

    request: Request
    session: Session
    received_at: float
    number: int  # order of arrival
    phase: Phase = Phase.WAITING
    block_ids: list[int] = field(default_factory=list)  # prompt, then first growth; dealt to sequences at the commit
    state_ids: list[int] = field(default_factory=list)  # one for each choice, the prompt's first; dealt as well
    reservation: Reservation | None = None
    num_computed: int = 0  # tokens of a prompt that is computed here
    compute_s: float = 0.0  # its share, by tokens, of the steps that computed them
    prompt_logprobs: list[Sampled] = field(default_factory=list)
    reserved_at: float = 0.0
    arrived_at: float = 0.0  # when the commit came, until the first step begins
    committed_at: float = 0.0
    last_token_at: float = 0.0  # of any of its choices
    sequences: list[Sequence] = field(default_factory=list)  # unfinished choices
    cancelled_choices: set[int] = field(default_factory=set)

    @property
    def deadline(self) -> float:
        return self.received_at + self.request.timeout_s

    @property
    def state(self) -> int | None:
        """The prompt's, until it is dealt."""
        return self.state_ids[0] if self.state_ids else None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Its last token is not in the cache yet: the next step computes it.

    It holds rows (`block_ids`) or, while it is swapped out, swap rows (`slots`), never both; so too its one row of the
    regions of sequences, for a model that has such.
    """

    generation: Generation
    choice: int
    sampling: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    last_token_at: float
    block_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    state_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def state(self) -> int | None:
        return self.state_ids[0] if self.state_ids else None

    @property
    def seniority(self) -> tuple[int, int, int]:
        """Smaller stays longer when rows run out: higher priority, then earlier arrival."""
        return (-self.generation.request.priority, self.generation.number, self.choice)

    @property
    def token_due_at(self) -> float:
        """When its next token should come: the batch takes those first that are due first."""
        return self.last_token_at + (self.generation.request.tpot_target_s or RELAXED_TPOT_S)


RELAXED_TPOT_S = 1.0  # stands in for a target where a request has none
