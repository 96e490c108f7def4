"""Real servers on a free port of 127.0.0.1, real channels, and child processes where signals are involved."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service import serve
from twinpool import errors
from twinpool.v1 import router_pb2 as pb
from twinpool.v1.router_pb2_grpc import RouterServicer, RouterStub, add_RouterServicer_to_server
from twinpool.v1.worker_pb2 import DecodeCommand, DecodeEvents
from twinpool.v1.worker_pb2_grpc import DecodeServicer, DecodeStub, add_DecodeServicer_to_server


class Router(RouterServicer):
    """Raises `failure`, after `num_chunks` chunks when streaming."""

    def __init__(self, failure: Exception | None = None, num_chunks: int = 0) -> None:
        self.failure = failure
        self.num_chunks = num_chunks
        self.closed = asyncio.Event()

    async def Generate(self, request, context):
        if self.failure:
            raise self.failure
        return pb.GenerateResponse(request_id=request.request_id)

    async def GenerateStream(self, request, context):
        try:
            for _ in range(self.num_chunks):
                yield pb.GenerateChunk(request_id=request.request_id)
            if self.failure:
                raise self.failure
            await asyncio.Event().wait()
        finally:
            self.closed.set()


class Decode(DecodeServicer):
    async def Session(self, requests, context):
        async for _ in requests:
            yield DecodeEvents()


async def start(router: Router, **options) -> serve.Serving:
    service = serve.Service(name="twinpool.v1.Router", add=add_RouterServicer_to_server, servicer=router)
    return await serve.serve([service], host="127.0.0.1", port=0, **options)


async def error_of(call) -> errors.TwinpoolError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return errors.from_status(caught.value.code(), caught.value.details(), caught.value.trailing_metadata())


async def drain(stream: AsyncIterator) -> list:
    return [message async for message in stream]


@pytest.mark.parametrize(
    "failure",
    [
        errors.InvalidRequest("top_p is 3; allowed is over 0 to 1", field="sampling.top_p"),
        errors.Overloaded("queue is full", retry_after_s=1.5),
        errors.PoolEmpty("no decode worker"),
        errors.UnknownModel("no model «größe»"),
    ],
    ids=lambda failure: type(failure).__name__,
)
async def test_a_typed_error_crosses_the_wire_whole(failure):
    serving = await start(Router(failure, num_chunks=2))
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
            stub = RouterStub(channel)
            for call in (stub.Generate(pb.GenerateRequest()), drain(stub.GenerateStream(pb.GenerateRequest()))):
                error = await error_of(call)
                assert type(error) is type(failure)
                assert (error.message, error.field, error.retry_after_s, error.code) == (
                    failure.message,
                    failure.field,
                    failure.retry_after_s,
                    failure.code,
                )
    finally:
        await serving.stop(0)


async def test_an_unexpected_error_is_internal_with_an_id_and_tells_no_more(caplog):
    serving = await start(Router(ValueError("secret detail")))
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
            error = await error_of(RouterStub(channel).Generate(pb.GenerateRequest()))
    finally:
        await serving.stop(0)
    assert type(error) is errors.Internal
    assert "secret detail" not in error.message
    (record,) = [record for record in caplog.records if record.message == "unexpected error"]
    assert record.error_id in error.message
    assert record.exc_info[1].args == ("secret detail",)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_message_that_is_no_protobuf_is_an_invalid_request(method):
    serving = await start(Router())
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
            call = channel.unary_stream(f"/twinpool.v1.Router/{method}", request_serializer=bytes)
            error = await error_of(call(b"\x1a\x04h\xffi!").read())  # field 3, a string, that is not UTF-8
    finally:
        await serving.stop(0)
    assert type(error) is errors.InvalidRequest
    assert "UTF-8" in error.message


async def test_a_long_message_is_cut_to_what_headers_carry():
    serving = await start(Router(errors.InvalidRequest("x" * 1_000_000)))
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
            error = await error_of(RouterStub(channel).Generate(pb.GenerateRequest()))
    finally:
        await serving.stop(0)
    assert type(error) is errors.InvalidRequest
    assert set(error.message) == {"x"}


async def test_a_handler_is_closed_when_its_client_goes_away():
    router = Router(num_chunks=1)
    serving = await start(router)
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
            call = RouterStub(channel).GenerateStream(pb.GenerateRequest())
            await call.read()
            call.cancel()
            await asyncio.wait_for(router.closed.wait(), 10)
    finally:
        await serving.stop(0)


async def test_health_and_reflection_know_the_services():
    serving = await start(Router())
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "twinpool.v1.Router"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await serving.set_serving(False)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == (
                health_pb2.HealthCheckResponse.NOT_SERVING
            )
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            (listing,) = await drain(stub.ServerReflectionInfo(requests))
            names = {service.name for service in listing.list_services_response.service}
            assert {"twinpool.v1.Router", "grpc.health.v1.Health"} <= names
    finally:
        await serving.stop(0)


async def test_a_port_in_use_is_an_error_that_names_it():
    serving = await start(Router())
    try:
        with pytest.raises(errors.ConfigError, match=rf"127\.0\.0\.1:{serving.port} is in use.*TWINPOOL_PORT"):
            await serve.serve([], host="127.0.0.1", port=serving.port)
    finally:
        await serving.stop(0)


async def test_a_request_of_many_megabytes_passes():
    serving = await start(Router())
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
            request = pb.GenerateRequest(request_id="r", text="x" * (8 << 20))  # gRPC's own limit is 4 MiB
            assert (await RouterStub(channel).Generate(request)).request_id == "r"
    finally:
        await serving.stop(0)


@pytest.mark.parametrize("key", ["", "wrong", "right-key "[:-1] + "x"])
async def test_an_internal_service_refuses_callers_without_the_key(key, caplog):
    service = serve.Service(
        name="twinpool.v1.Decode", add=add_DecodeServicer_to_server, servicer=Decode(), internal=True
    )
    serving = await serve.serve([service], host="127.0.0.1", port=0, cluster_key="right-key")
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}", key) as channel:
            call = DecodeStub(channel).Session()  # sends nothing: the refusal must not wait for a message
            error = await error_of(asyncio.wait_for(call.read(), 10))
            assert type(error) is errors.Unauthenticated
            assert "right-key" not in error.message
            await error_of(asyncio.wait_for(DecodeStub(channel).Session().read(), 10))
        (said,) = (record for record in caplog.records if "cluster key" in record.message)  # not for each of them
        assert (said.method, said.refused) == ("/twinpool.v1.Decode/Session", 1)
        assert said.peer.startswith("ipv4:127.0.0.1:")
        assert "right-key" not in str(vars(said))
    finally:
        await serving.stop(0)


async def test_an_internal_service_answers_callers_with_the_key():
    service = serve.Service(
        name="twinpool.v1.Decode", add=add_DecodeServicer_to_server, servicer=Decode(), internal=True
    )
    serving = await serve.serve([service], host="127.0.0.1", port=0, cluster_key="right-key")
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}", "right-key") as channel:
            answers = await drain(DecodeStub(channel).Session(iter([DecodeCommand(), DecodeCommand()])))
            assert len(answers) == 2
    finally:
        await serving.stop(0)


async def test_clients_need_no_key():
    serving = await start(Router(), cluster_key="right-key")
    try:
        async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
            assert (await RouterStub(channel).Generate(pb.GenerateRequest(request_id="r"))).request_id == "r"
    finally:
        await serving.stop(0)


def test_a_ready_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"no/such/ready\.json.*--ready-file"):
        serve.announce_ready("127.0.0.1:7072", -1, str(tmp_path / "no/such/ready.json"))
    with pytest.raises(errors.ConfigError, match="cannot write /: "):
        serve.announce_ready("127.0.0.1:7072", -1, "/")
    (tmp_path / "ready.json").mkdir()
    with pytest.raises(errors.ConfigError, match=r"ready\.json: Is a directory"):
        serve.announce_ready("127.0.0.1:7072", -1, str(tmp_path / "ready.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]  # no draft is left


CHILD = """
import asyncio, sys
from service import log, serve
from tests.service.test_serve import Router, start

async def main(stop):
    serving = await start(Router(num_chunks=1))
    serve.announce_ready(f"127.0.0.1:{serving.port}", -1, sys.argv[1])
    await stop.wait()
    if sys.argv[2:] == ["hang"]:
        await asyncio.Event().wait()
    await serving.stop(0)

log.setup("info", "router")
serve.run(main)
"""


def read_ready_file(path: Path) -> dict:
    """{} while it is not there; else all of it, since it appears whole."""
    return json.loads(path.read_text()) if path.exists() else {}


async def start_child(tmp_path: Path, *argv: str) -> tuple[asyncio.subprocess.Process, str]:
    """A server in a process of its own, and its address from the ready file."""
    ready = tmp_path / "ready.json"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(ready), *argv, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(30):
        while not (facts := read_ready_file(ready)):
            assert child.returncode is None, await child.stderr.read()
            await asyncio.sleep(0.02)
    assert facts["pid"] == child.pid
    return child, facts["address"]


async def lines_of(child: asyncio.subprocess.Process) -> list[dict]:
    _, text = await asyncio.wait_for(child.communicate(), 30)
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_in_good_order(tmp_path, number):
    child, address = await start_child(tmp_path)
    child.send_signal(number)
    events = await lines_of(child)
    assert child.returncode == 0
    assert [event["event"] for event in events] == ["ready", "stopping"]
    assert events[0]["address"] == address


async def test_a_second_signal_ends_a_process_that_hangs_while_draining(tmp_path):
    child, _ = await start_child(tmp_path, "hang")
    child.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    assert child.returncode is None
    child.send_signal(signal.SIGTERM)
    assert [event["event"] for event in await lines_of(child)] == ["ready", "stopping", "stopping"]
    assert child.returncode == 0


async def test_a_frozen_peer_ends_the_calls_to_it(tmp_path):
    child, address = await start_child(tmp_path)
    try:
        async with serve.channel(address) as channel:
            call = RouterStub(channel).GenerateStream(pb.GenerateRequest(request_id="r"))
            assert (await call.read()).request_id == "r"
            child.send_signal(signal.SIGSTOP)
            error = await error_of(asyncio.wait_for(call.read(), 60))
            assert isinstance(error, errors.Unavailable)
    finally:
        child.send_signal(signal.SIGCONT)
        child.terminate()
        await asyncio.wait_for(child.communicate(), 30)


async def test_a_burst_of_calls_is_not_reset():
    """All arrive before the loop accepts the first; gRPC resets some of over 1000 unless told otherwise."""
    serving = await start(Router())
    async with serve.channel(f"127.0.0.1:{serving.port}") as channel:
        stub = RouterStub(channel)
        calls = [stub.Generate(pb.GenerateRequest(request_id=str(i))) for i in range(4000)]
        answers = await asyncio.gather(*calls)
    await serving.stop(grace_s=0)
    assert [answer.request_id for answer in answers] == [str(i) for i in range(4000)]
