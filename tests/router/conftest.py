"""A router in the test's process, a model directory without a model, and what must be true after every test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.config import RouterConfig
from router.detokenizer import _BYTE_OF
from router.metrics import RouterMetrics
from router.router import Router
from tests.fakes import Deployment
from twinpool import errors
from twinpool.v1 import router_pb2
from twinpool.v1.router_pb2_grpc import RouterStub

MAX_CONTEXT = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256 to 258; 0 to 255 are the bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Every byte is a token, whose id is the byte."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(_BYTE_OF), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "fake"
    folder.mkdir()
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": 264, "max_position_embeddings": MAX_CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


class Api:
    """The router as a client sees it, in the messages themselves. Errors come typed."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.address = f"127.0.0.1:{router.port}"
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub: Any = RouterStub(self.channel)

    async def call(self, method: str, message: Any, timeout_s: float = 20.0) -> Any:
        try:
            return await getattr(self.stub, method)(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise typed(error) from error

    async def generate(self, prompt: str | list[int], **fields: Any) -> router_pb2.GenerateResponse:
        return await self.call("Generate", question(prompt, **fields))

    async def text(self, prompt: str | list[int], **fields: Any) -> str:
        answer = await self.generate(prompt, **fields)
        return answer.choices[0].text

    async def stream(self, prompt: str | list[int], **fields: Any) -> AsyncIterator[router_pb2.GenerateChunk]:
        call = self.stub.GenerateStream(question(prompt, **fields), timeout=20)
        try:
            async for chunk in call:
                yield chunk
        except grpc.aio.AioRpcError as error:
            raise typed(error) from error
        finally:
            call.cancel()

    async def ready(self, workers: int) -> None:
        """Waits until that many workers are ready."""

        async def joined() -> bool:
            pools = await self.stub.GetPools(router_pb2.GetPoolsRequest())
            return sum(w.state == router_pb2.WORKER_STATE_READY for w in pools.workers) == workers

        await eventually(joined)


def question(prompt: str | list[int], **fields: Any) -> router_pb2.GenerateRequest:
    names = router_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    own = {name: fields.pop(name) for name in list(fields) if name in names}
    message = router_pb2.GenerateRequest(sampling=router_pb2.Sampling(**fields), **own)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
        message.token_ids.SetInParent()
    return message


def typed(error: grpc.aio.AioRpcError) -> errors.TwinpoolError:
    return errors.from_status(error.code(), error.details() or "", error.trailing_metadata())


async def eventually(
    condition: Callable[[], Any], timeout_s: float = 10.0, seen: Callable[[], Any] | None = None
) -> None:
    """Returns when `condition` (a function or a coroutine function) is true; fails when it is not in time."""
    end = asyncio.get_running_loop().time() + timeout_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        if asyncio.get_running_loop().time() > end:
            raise AssertionError(f"not within {timeout_s:g} s; last seen: {seen() if seen else value}")
        await asyncio.sleep(0.005)


async def nothing(held: Callable[[], list[Any]]) -> None:
    """Returns when `held` is empty; fails with what it holds."""
    await eventually(lambda: not held(), seen=held)


def held(router: Router) -> list[str]:
    """What the router still holds of requests."""
    front_door = router.front_door
    found = [f"queued {front_door.queued}"] if front_door.queued else []
    found += [f"running {front_door.running}"] if front_door.running else []
    for worker in router.registry:
        found += [f"{worker.info.worker_id} claimed {len(worker.claims)}"] if worker.claims else []
        listeners = getattr(worker.link, "_listeners", None)
        found += [f"{worker.info.worker_id} listened to by {list(listeners)}"] if listeners else []
    return found


Start = Callable[..., Awaitable[Api]]


@pytest.fixture
async def start(model_dir: Path) -> AsyncIterator[Start]:
    """start(**options) -> the API of a running router. At the end nothing may be held and no task left."""
    running: list[Api] = []
    before = asyncio.all_tasks()

    async def start_router(**options: Any) -> Api:
        defaults = {
            "tokenizer": str(model_dir),
            "port": 0,
            "heartbeat_ms": 50,
            "lease_ms": 1000,
            "pool_wait": 0.3,
            "max_attempts": 3,  # as many as tests count
            "probe_timeout": 0.0,  # what a worker was asked is what the test asked; test_prober.py has probes
        }
        router = Router(RouterConfig(**(defaults | options)), RouterMetrics(CollectorRegistry()))
        await router.start()
        running.append(Api(router))
        return running[-1]

    yield start_router
    for api in running:
        await nothing(lambda api=api: held(api.router))
        await api.channel.close()
        await api.router.stop(0)
    await nothing(lambda: leaked_tasks(before))


@pytest.fixture
async def api(start: Start) -> Api:
    return await start()


@pytest.fixture
async def fakes(api: Api) -> AsyncIterator[Deployment]:
    """Workers for `api`; a test adds what it needs. At the end they hold nothing."""
    async with Deployment(api.address) as deployment:
        yield deployment
        await nothing(lambda: deployment.held + held(api.router))


def leaked_tasks(before: set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Tasks that were not there before, but for the caller's own."""
    mine = asyncio.current_task()
    return [task for task in asyncio.all_tasks() - before if task is not mine]
