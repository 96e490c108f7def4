"""Whoever reaches a port without a right to it: noise on every port, and peers without the cluster's key."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from kvtransfer import KvSender, Region, wire
from kvtransfer.target import Span, Target
from tests.certificates import Authority
from tests.flow.cluster import Cluster, Process
from tests.flow.oracle import Oracle
from twinpool.client import Client
from twinpool.errors import Unauthenticated
from twinpool.v1 import worker_pb2, worker_pb2_grpc

NUM_FRAMES = 10_000
FRAMES_A_CONNECTION = 20
MAX_GROWTH_BYTES = 64 << 20  # of a process that serves all that: pools of gRPC and of the allocator fill once
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PROMPT = list(range(30, 90))


def address_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def kv_port(decode: Process) -> int:
    endpoints = next(line for line in decode.log.splitlines() if "KV rows are received at" in line)
    return int(endpoints.partition("tcp://127.0.0.1:")[2].partition('"')[0].partition(",")[0])


def resident_bytes(process: Process) -> int:
    pages = int(Path(f"/proc/{process.popen.pid}/statm").read_text().split()[1])
    return pages * 4096


def http2_frame(rng: random.Random) -> bytes:
    body = rng.randbytes(rng.randrange(64))
    return len(body).to_bytes(3, "big") + bytes([rng.randrange(12), rng.randrange(256)]) + rng.randbytes(4) + body


def kv_frame(rng: random.Random) -> bytes:
    valid = bytearray(wire.encode(wire.Hello(protocol=wire.PROTOCOL, nonce=bytes(16))))
    if rng.randrange(2):
        valid[rng.randrange(len(valid))] = rng.randrange(256)
        return bytes(valid)
    return b"TPKV" + bytes([wire.PROTOCOL, rng.randrange(24), 0, 0]) + rng.randbytes(rng.randrange(60))


def attack(port: int, preface: bytes, make_frame: Callable[[random.Random], bytes], num_frames: int, seed: int) -> None:
    """Connection after connection of `make_frame`'s frames, every tenth of them plain noise."""
    rng = random.Random(seed)
    for _ in range(num_frames // FRAMES_A_CONNECTION):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock, contextlib.suppress(OSError):
            sock.sendall(preface)
            for _ in range(FRAMES_A_CONNECTION):
                sock.sendall(make_frame(rng) if rng.randrange(10) else rng.randbytes(rng.randrange(200)))


@pytest.mark.timeout(240)
def test_noise_on_every_port_ends_no_process_and_changes_no_answer(
    deploy: Callable[..., Cluster], tiny_model: Path
) -> None:
    cluster = deploy(1, 1, kv_transport="tcp")
    processes = [cluster.processes[name] for name in ("router", "prefill-0", "decode-0")]
    expected = Oracle(tiny_model).answer(PROMPT, 12)
    targets = [(address_of(process.address)[1], PREFACE, http2_frame) for process in processes]
    targets.append((kv_port(cluster.processes["decode-0"]), b"", kv_frame))

    def attack_all(num_frames: int, seed: int) -> None:
        for port, preface, make_frame in targets:
            attack(port, preface, make_frame, num_frames, seed)

    attack_all(NUM_FRAMES // 10, seed=1)  # what is allocated once
    before = [resident_bytes(process) for process in processes]
    attack_all(NUM_FRAMES - NUM_FRAMES // 10, seed=2)
    for process, bytes_before in zip(processes, before, strict=True):
        assert process.popen.poll() is None, f"{process.name} died:\n{process.log[-2000:]}"
        assert resident_bytes(process) - bytes_before < MAX_GROWTH_BYTES, process.name
    with cluster.client() as client:
        assert client.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True).token_ids == expected
    cluster.assert_baseline()


def test_who_lacks_the_key_is_refused_on_both_planes(
    deploy: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINPOOL_CLUSTER_KEY", "the right one")
    cluster = deploy(1, 1, kv_transport="tcp")
    decode = cluster.processes["decode-0"]
    with grpc.insecure_channel(cluster.processes["prefill-0"].address) as channel:
        stub = worker_pb2_grpc.PrefillStub(channel)
        for metadata in ((), (("twinpool-cluster-key", "a wrong one"),)):
            with pytest.raises(grpc.RpcError) as refused:
                next(stub.Run(worker_pb2.PrefillRequest(), metadata=metadata, timeout=10))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    regions = [Region(name="layer.0", group="kv", buffer=memoryview(bytearray(1 << 12)), row_bytes=1 << 10)]
    target = Target(
        endpoints=(f"tcp://127.0.0.1:{kv_port(decode)}",),
        incarnation=bytes(16),
        token=bytes(16),
        request_id="r1",
        attempt=1,
        spans={"kv": Span(first=0, size=1)},
    )
    stranger = KvSender(regions, fingerprint="any", cluster_key="a wrong one", transport="tcp")
    push = stranger.open(target.encode(), request_id="r1", attempt=1, timeout_s=10)
    assert push.closed.wait(15)
    assert isinstance(push.error, Unauthenticated)
    stranger.close()
    with cluster.client() as client:
        assert_answers(client)
    cluster.assert_baseline()


def test_with_certificates_both_planes_are_closed_to_who_has_none(
    deploy: Callable[..., Cluster], tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = Authority(tmp_path / "ca").issue("worker")
    theirs = Authority(tmp_path / "another-ca").issue("worker")
    for name in ("cert", "key", "ca"):
        monkeypatch.setenv(f"TWINPOOL_TLS_{name.upper()}", str(getattr(ours, name)))
    cluster = deploy(1, 1, kv_transport="tcp")
    with cluster.client() as client:
        answer = client.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
        assert answer.token_ids == Oracle(tiny_model).answer(PROMPT, 12, ignore_eos=True)
    port = kv_port(cluster.processes["decode-0"])
    hello = wire.encode(wire.Hello(protocol=wire.PROTOCOL, nonce=bytes(16)))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(hello)
        assert b"over TLS only" in plain.recv(4096)
    context = ssl.create_default_context(cafile=str(ours.ca))
    for issued in (None, theirs):
        if issued is not None:
            context.load_cert_chain(issued.cert, issued.key)
        with pytest.raises((ssl.SSLError, ConnectionError)):  # TLS 1.3 refuses after the handshake, at once or later
            say(context, port, hello)
    for process in cluster.processes.values():
        with grpc.insecure_channel(process.address) as channel, pytest.raises(grpc.RpcError) as refused:
            worker_pb2_grpc.PrefillStub(channel).Run(worker_pb2.PrefillRequest(), timeout=10).next()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with cluster.client() as client:
        assert_answers(client)
    cluster.assert_baseline()


def say(context: ssl.SSLContext, port: int, frame: bytes) -> None:
    """Raises ConnectionError or SSLError when nothing comes back."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as encrypted,
    ):
        encrypted.sendall(frame)
        if not encrypted.recv(4096):
            raise ConnectionError("closed without a byte")


def assert_answers(client: Client) -> None:
    assert len(client.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True).token_ids) == 4
