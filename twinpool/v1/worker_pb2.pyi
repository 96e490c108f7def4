from twinpool.v1 import router_pb2 as _router_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "pool", "address", "model", "fingerprint", "version", "block_size", "max_context", "rows_total", "serves_alone")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SERVES_ALONE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    pool: _router_pb2.Pool
    address: str
    model: str
    fingerprint: str
    version: str
    block_size: int
    max_context: int
    rows_total: int
    serves_alone: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., pool: _Optional[_Union[_router_pb2.Pool, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., version: _Optional[str] = ..., block_size: _Optional[int] = ..., max_context: _Optional[int] = ..., rows_total: _Optional[int] = ..., serves_alone: _Optional[bool] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "rows_free", "tokens_per_s", "waiting_tokens", "draining", "waiting_long_tokens", "prefix_digests")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FREE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITING_LONG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    rows_free: int
    tokens_per_s: float
    waiting_tokens: int
    draining: bool
    waiting_long_tokens: int
    prefix_digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., rows_free: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., waiting_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., waiting_long_tokens: _Optional[int] = ..., prefix_digests: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("info", "load")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    load: WorkerLoad
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class RegistryReply(_message.Message):
    __slots__ = ("heartbeat_ms", "lease_ms", "drain")
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ms: int
    lease_ms: int
    drain: bool
    def __init__(self, heartbeat_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., drain: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "logprob", "top", "finish_reason")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_router_pb2.TopLogprob]
    finish_reason: _router_pb2.FinishReason
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_router_pb2.TopLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_router_pb2.FinishReason, str]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "num_prompt_tokens", "sampling", "input_class", "sla_class", "transfer_target", "first_choice", "priority", "cache_salt", "generate", "probe")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    INPUT_CLASS_FIELD_NUMBER: _ClassVar[int]
    SLA_CLASS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TARGET_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _router_pb2.Sampling
    input_class: str
    sla_class: str
    transfer_target: bytes
    first_choice: int
    priority: int
    cache_salt: str
    generate: bool
    probe: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_router_pb2.Sampling, _Mapping]] = ..., input_class: _Optional[str] = ..., sla_class: _Optional[str] = ..., transfer_target: _Optional[bytes] = ..., first_choice: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., generate: _Optional[bool] = ..., probe: _Optional[bool] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_tokens", "transferred", "tokens")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: FirstTokens
    transferred: Transferred
    tokens: TokensOut
    def __init__(self, first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., transferred: _Optional[_Union[Transferred, _Mapping]] = ..., tokens: _Optional[_Union[TokensOut, _Mapping]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "cached_tokens", "queue_ms", "prefill_ms", "prompt_logprobs", "compute_ms")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SampledToken]
    compute_ms: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., compute_ms: _Optional[float] = ...) -> None: ...

class Transferred(_message.Message):
    __slots__ = ("bytes", "rows", "transfer_ms", "transfer_wait_ms")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    rows: int
    transfer_ms: float
    transfer_wait_ms: float
    def __init__(self, bytes: _Optional[int] = ..., rows: _Optional[int] = ..., transfer_ms: _Optional[float] = ..., transfer_wait_ms: _Optional[float] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: DecodeSubmit
    cancel: DecodeCancel
    def __init__(self, submit: _Optional[_Union[DecodeSubmit, _Mapping]] = ..., cancel: _Optional[_Union[DecodeCancel, _Mapping]] = ...) -> None: ...

class DecodeSubmit(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "num_prompt_tokens", "sampling", "first_choice", "timeout_ms", "tpot_target_ms", "sla_class", "priority", "max_batch", "local_prefill", "probe", "handle")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    SLA_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _router_pb2.Sampling
    first_choice: int
    timeout_ms: int
    tpot_target_ms: float
    sla_class: str
    priority: int
    max_batch: int
    local_prefill: bool
    probe: bool
    handle: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_router_pb2.Sampling, _Mapping]] = ..., first_choice: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., tpot_target_ms: _Optional[float] = ..., sla_class: _Optional[str] = ..., priority: _Optional[int] = ..., max_batch: _Optional[int] = ..., local_prefill: _Optional[bool] = ..., probe: _Optional[bool] = ..., handle: _Optional[int] = ...) -> None: ...

class DecodeCancel(_message.Message):
    __slots__ = ("request_id", "attempt", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class DecodeEvents(_message.Message):
    __slots__ = ("events", "step")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    step: Step
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("handles", "token_ids")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "reserved", "tokens", "ended", "first_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reserved: Reserved
    tokens: TokensOut
    ended: DecodeEnded
    first_tokens: FirstTokens
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., tokens: _Optional[_Union[TokensOut, _Mapping]] = ..., ended: _Optional[_Union[DecodeEnded, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("transfer_target",)
    TRANSFER_TARGET_FIELD_NUMBER: _ClassVar[int]
    transfer_target: bytes
    def __init__(self, transfer_target: _Optional[bytes] = ...) -> None: ...

class TokensOut(_message.Message):
    __slots__ = ("choice", "tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    def __init__(self, choice: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ...) -> None: ...

class DecodeEnded(_message.Message):
    __slots__ = ("reason", "error", "message", "decode_ms")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[DecodeEnded.Reason]
        REASON_FINISHED: _ClassVar[DecodeEnded.Reason]
        REASON_CANCELLED: _ClassVar[DecodeEnded.Reason]
        REASON_REJECTED: _ClassVar[DecodeEnded.Reason]
        REASON_TRANSFER_FAILED: _ClassVar[DecodeEnded.Reason]
        REASON_PREEMPTED: _ClassVar[DecodeEnded.Reason]
        REASON_FAILED: _ClassVar[DecodeEnded.Reason]
    REASON_UNSPECIFIED: DecodeEnded.Reason
    REASON_FINISHED: DecodeEnded.Reason
    REASON_CANCELLED: DecodeEnded.Reason
    REASON_REJECTED: DecodeEnded.Reason
    REASON_TRANSFER_FAILED: DecodeEnded.Reason
    REASON_PREEMPTED: DecodeEnded.Reason
    REASON_FAILED: DecodeEnded.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    reason: DecodeEnded.Reason
    error: str
    message: str
    decode_ms: float
    def __init__(self, reason: _Optional[_Union[DecodeEnded.Reason, str]] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., decode_ms: _Optional[float] = ...) -> None: ...
