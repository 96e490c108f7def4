"""Random and mutated messages in well-formed gRPC calls, so that they get past HTTP/2 and to every method's parser."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.flow.cluster import Cluster
from tests.flow.oracle import Oracle
from tests.flow.test_strangers import MAX_GROWTH_BYTES, PROMPT, resident_bytes
from twinpool.v1 import router_pb2, worker_pb2

NUM_MESSAGES = 1_000  # on each gRPC port, beside the frames of test_strangers.py
KEY = "the cluster's key"
SAMPLING = router_pb2.Sampling(temperature=0.5, max_tokens=2, stop=["x"], logprobs=2)
GENERATE = router_pb2.GenerateRequest(text="Hello there", sampling=SAMPLING, sla_class="batch", tenant="a")
ROUTER = "/twinpool.v1.Router/"
METHODS: dict[str, list[tuple[str, bytes]]] = {
    "router": [
        (ROUTER + "Generate", GENERATE.SerializeToString()),
        (ROUTER + "GenerateStream", GENERATE.SerializeToString()),
        (ROUTER + "Tokenize", router_pb2.TokenizeRequest(text="Hello there").SerializeToString()),
        (ROUTER + "Detokenize", router_pb2.DetokenizeRequest(token_ids=[11, 12, 300]).SerializeToString()),
        (ROUTER + "Explain", router_pb2.ExplainRequest(request_id="why").SerializeToString()),
        ("/twinpool.v1.Registry/Drain", worker_pb2.DrainRequest(worker_id="stranger").SerializeToString()),
        (
            "/twinpool.v1.Registry/Join",
            worker_pb2.WorkerReport(
                info=worker_pb2.WorkerInfo(worker_id="stranger", address="127.0.0.1:1", model="another", block_size=16),
                load=worker_pb2.WorkerLoad(running=1, rows_free=3),
            ).SerializeToString(),
        ),
    ],
    "prefill-0": [
        (
            "/twinpool.v1.Prefill/Run",
            worker_pb2.PrefillRequest(
                request_id="r", attempt=1, token_ids=[11, 12, 13], num_prompt_tokens=3, input_class="short",
                sampling=SAMPLING, transfer_target=b"none",
            ).SerializeToString(),
        )
    ],
    "decode-0": [
        (
            "/twinpool.v1.Decode/Session",
            worker_pb2.DecodeCommand(
                submit=worker_pb2.DecodeSubmit(
                    request_id="r", attempt=1, token_ids=[11, 12, 13], num_prompt_tokens=3, sampling=SAMPLING,
                    timeout_ms=200,
                )
            ).SerializeToString(),
        )
    ],
}  # fmt: skip


def mutations(valid: bytes, seed: int, count: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(valid if rng.randrange(5) else rng.randbytes(rng.randrange(80)))
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(data) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                data[place:place] = rng.randbytes(rng.randrange(1, 6))
            elif kind == 1:
                del data[place : place + rng.randrange(1, 6)]
            elif data and place < len(data):
                data[place] = rng.randrange(256) if kind == 2 else data[place] ^ 1 << rng.randrange(8)
        yield bytes(data)


def outcome(call: Callable[..., Iterator[bytes]], message: bytes) -> str:
    """How the call ended: its status."""
    answers = call(iter([message]), timeout=20, metadata=(("twinpool-cluster-key", KEY),))
    try:
        for _ in answers:
            pass
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.timeout(300)
def test_mutated_messages_end_no_process_and_are_no_internal_errors(
    deploy: Callable[..., Cluster], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # X1
    monkeypatch.setenv("TWINPOOL_CLUSTER_KEY", KEY)
    cluster = deploy(1, 1)
    expected = Oracle(tiny_model).answer(PROMPT, 12)
    processes = [cluster.processes[name] for name in METHODS]

    def attack(process: str, count: int, seed: int) -> Counter[str]:
        with grpc.insecure_channel(cluster.processes[process].address) as channel, ThreadPoolExecutor(8) as threads:
            ends: Counter[str] = Counter()
            for path, valid in METHODS[process]:
                call = channel.stream_stream(path)
                messages = mutations(valid, seed, count // len(METHODS[process]))
                ends += Counter(
                    f"{path.rpartition('/')[2]} {end}" for end in threads.map(lambda m, c=call: outcome(c, m), messages)
                )
            return ends

    for name in METHODS:
        attack(name, NUM_MESSAGES // 10, seed=1)  # what is allocated once
    before = [resident_bytes(process) for process in processes]
    ends = sum((attack(name, NUM_MESSAGES, seed=2) for name in METHODS), Counter[str]())
    for process, bytes_before in zip(processes, before, strict=True):
        assert process.popen.poll() is None, f"{process.name} died:\n{process.log[-2000:]}"
        assert resident_bytes(process) - bytes_before < MAX_GROWTH_BYTES, process.name
        assert "Traceback" not in process.log, process.log[process.log.index("Traceback") :][:3000]
    assert not [end for end in ends if end.endswith((" INTERNAL", " UNKNOWN"))], ends
    assert any(end.endswith(" INVALID_ARGUMENT") for end in ends)
    with cluster.client() as client:
        assert client.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True).token_ids == expected
    cluster.assert_baseline()
