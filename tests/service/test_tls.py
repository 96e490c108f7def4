"""gRPC over mutual TLS: real servers and channels on 127.0.0.1, with certificates that openssl made."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from service import serve
from tests.certificates import Authority, Issued
from tests.service.test_serve import Router, start
from twinpool import AsyncClient, Client
from twinpool.errors import ConfigError, Internal, Unavailable
from twinpool.v1 import router_pb2 as pb
from twinpool.v1.router_pb2_grpc import RouterStub

PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return Authority(tmp_path_factory.mktemp("certificates") / "ca").issue("router")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return Authority(tmp_path_factory.mktemp("foreign") / "ca").issue("stranger")


async def code_of(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a call on `channel`, which is closed then, ends."""
    async with channel:
        call = RouterStub(channel).Generate(pb.GenerateRequest(request_id="r1"), timeout=PATIENCE_S)
        return await call.code()


async def test_both_sides_of_one_ca_are_served(issued: Issued) -> None:
    serving = await start(Router(), certificates=issued.load())
    try:
        for host in ("127.0.0.1", "localhost"):
            assert await code_of(serve.channel(f"{host}:{serving.port}", "", issued.load())) is grpc.StatusCode.OK
    finally:
        await serving.stop(0)


async def test_strangers_and_plain_text_are_refused_on_either_side(issued: Issued, foreign: Issued) -> None:
    certificates = issued.load()
    serving = await start(Router(), certificates=certificates)
    plain = await start(Router())
    bare = grpc.ssl_channel_credentials(certificates.ca_pem)
    try:
        address = f"127.0.0.1:{serving.port}"
        assert await code_of(serve.channel(address)) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(serve.channel(address, "", foreign.load())) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(grpc.aio.secure_channel(address, bare)) is grpc.StatusCode.UNAVAILABLE
        to_plain = serve.channel(f"127.0.0.1:{plain.port}", "", certificates)
        assert await code_of(to_plain) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(serve.channel(address, "", certificates)) is grpc.StatusCode.OK
    finally:
        await serving.stop(0)
        await plain.stop(0)


async def test_a_connection_that_fails_for_tls_says_what_to_look_at(
    issued: Issued, foreign: Issued, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Authority(tmp_path / "ca").issue("elsewhere", names="IP:10.0.0.7")
    tls, plain = await start(Router(), certificates=issued.load()), await start(Router())
    strange = await start(Router(), certificates=elsewhere.load())
    cases: list[tuple[int, Issued | None, str]] = [
        (tls.port, None, "TWINPOOL_TLS_CERT"),
        (tls.port, foreign, "not of the CA given here, or has expired"),
        (plain.port, issued, "TLS is configured here, and not there"),
        (strange.port, elsewhere, "does not name the host"),
    ]
    try:
        for port, own, advice in cases:
            for name in ("CERT", "KEY", "CA"):
                monkeypatch.setenv(f"TWINPOOL_TLS_{name}", str(getattr(own, name.lower())) if own else "")
            async with AsyncClient(f"127.0.0.1:{port}", retries=0, timeout_s=PATIENCE_S) as client:
                with pytest.raises(Unavailable, match=advice):
                    await client.generate([1], max_tokens=1)
    finally:
        for serving in (tls, plain, strange):
            await serving.stop(0)


async def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    elsewhere = Authority(tmp_path / "ca").issue("elsewhere", names="DNS:elsewhere.example")
    serving = await start(Router(), certificates=elsewhere.load())
    try:
        channel = serve.channel(f"127.0.0.1:{serving.port}", "", elsewhere.load())
        assert await code_of(channel) is grpc.StatusCode.UNAVAILABLE
    finally:
        await serving.stop(0)


async def test_clients_need_no_certificate_where_the_router_asks_for_none(issued: Issued) -> None:
    serving = await start(Router(), certificates=issued.load(), client_certs=False)
    try:
        bare = grpc.ssl_channel_credentials(issued.load().ca_pem)
        assert await code_of(grpc.aio.secure_channel(f"127.0.0.1:{serving.port}", bare)) is grpc.StatusCode.OK
    finally:
        await serving.stop(0)


async def test_the_client_library_takes_its_certificates_from_the_environment(
    issued: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = await start(Router(), certificates=issued.load())
    try:
        monkeypatch.setenv("TWINPOOL_TLS_CA", str(issued.ca))
        assert await _generates(serving.port) is False  # it asks for a certificate
        monkeypatch.setenv("TWINPOOL_TLS_CERT", str(issued.cert))
        with pytest.raises(ConfigError, match="belong together"):
            Client("127.0.0.1:1")
        monkeypatch.setenv("TWINPOOL_TLS_KEY", str(issued.key))
        assert await _generates(serving.port) is True
        monkeypatch.setenv("TWINPOOL_TLS_CA", "/nowhere/ca.pem")
        with pytest.raises(ConfigError, match=r"/nowhere/ca\.pem"):
            Client("127.0.0.1:1")
    finally:
        await serving.stop(0)


async def _generates(port: int) -> bool:
    async with AsyncClient(f"127.0.0.1:{port}", retries=0, timeout_s=PATIENCE_S) as client:
        try:
            await client.generate([1], max_tokens=1)
        except Unavailable:
            return False
        except Internal:  # the router here answers without a choice
            return True
        raise AssertionError("an answer")
