"""Other ways to move the same rows between the same two processes, for bench.transfer: each has two ends.

The receiving end learns first where the next rows belong (`prepare`), then sits through the transfer (`serve`). The
sending end's `send` returns when all rows are in place at the other end, as far as that way can tell.
Mooncake and NIXL are measured over their own TCP, as raw loops over their calls, where they are installed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

import grpc

from kvtransfer import Region

Regions = Mapping[str, Sequence[Region]]  # by row size

MESSAGE_BYTES = 256 << 10  # of the gRPC stream
MAX_SEGMENTS = 256  # in one batch: thousands poison a Mooncake peer
PATIENCE_S = 60.0


class Receiving(Protocol):
    def describe(self) -> Any:
        """JSON for the sending end."""

    def prepare(self, pieces: Sequence[memoryview]) -> None:
        """The next rows belong there."""

    def serve(self) -> None:
        """Returns when they are there, where this end takes part."""

    def close(self) -> None: ...


class Sending(Protocol):
    def send(self, pieces: Sequence[memoryview], there: Sequence[int]) -> None:
        """there: the addresses of the pieces' places in the other process."""

    def close(self) -> None: ...


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def spans(regions: Regions) -> list[tuple[int, int]]:
    """Address and size of all memory in `regions`."""
    return [(address_of(each.buffer), each.buffer.nbytes) for group in regions.values() for each in group]


def segments(pieces: Sequence[memoryview], there: Sequence[int]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Sources, destinations and sizes of one batch after the other."""
    for first in range(0, len(pieces), MAX_SEGMENTS):
        some = pieces[first : first + MAX_SEGMENTS]
        yield [address_of(each) for each in some], list(there[first : first + MAX_SEGMENTS]), [len(p) for p in some]


class ReceivingSocket:
    """A TCP socket that scatters, without any protocol or checksum."""

    def __init__(self, regions: Regions) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socket: socket.socket | None = None
        self._pieces: Sequence[memoryview] = ()

    def describe(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def prepare(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces

    def serve(self) -> None:
        if self._socket is None:
            self._socket = self._listener.accept()[0]
        for piece in self._pieces:
            view = piece
            while view:
                view = view[self._socket.recv_into(view, 0, socket.MSG_WAITALL) :]
        self._socket.sendall(b"\x01")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._listener.close()


class SendingSocket:
    def __init__(self, regions: Regions, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, pieces: Sequence[memoryview], there: Sequence[int]) -> None:
        for piece in pieces:
            self._socket.sendall(piece)
        self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()


class ReceivingGrpc:
    """One client stream of plain bytes a transfer, without protobuf; each message is copied into its place."""

    def __init__(self, regions: Regions) -> None:
        self._pieces: Sequence[memoryview] = ()
        self._ended = threading.Event()
        handler = grpc.stream_unary_rpc_method_handler(self._take)
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Rows", {"Put": handler}),))
        self._port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def describe(self) -> int:
        return self._port

    def prepare(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces
        self._ended.clear()

    def _take(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        for piece in self._pieces:
            for first in range(0, len(piece), MESSAGE_BYTES):
                piece[first : first + MESSAGE_BYTES] = next(messages)
        self._ended.set()
        return b""

    def serve(self) -> None:
        self._ended.wait(PATIENCE_S)

    def close(self) -> None:
        self._server.stop(None)


class SendingGrpc:
    def __init__(self, regions: Regions, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._put = self._channel.stream_unary("/bench.Rows/Put")

    def send(self, pieces: Sequence[memoryview], there: Sequence[int]) -> None:
        steps = range(0, len(pieces[0]), MESSAGE_BYTES)
        messages = (bytes(piece[first : first + MESSAGE_BYTES]) for piece in pieces for first in steps)
        self._put(messages, timeout=PATIENCE_S)

    def close(self) -> None:
        self._channel.close()


def _mooncake(regions: Regions) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise ImportError("Mooncake does not start")
    for address, size in spans(regions):
        if engine.register_memory(address, size):
            raise ImportError("Mooncake does not register the memory")
    return engine


class ReceivingMooncake:
    def __init__(self, regions: Regions) -> None:
        self._engine = _mooncake(regions)

    def describe(self) -> str:
        return f"127.0.0.1:{self._engine.get_rpc_port()}"

    def prepare(self, pieces: Sequence[memoryview]) -> None: ...

    def serve(self) -> None:
        """The library's threads receive."""

    def close(self) -> None: ...


class SendingMooncake:
    def __init__(self, regions: Regions, session: str) -> None:
        self._engine = _mooncake(regions)
        self._session = session

    def send(self, pieces: Sequence[memoryview], there: Sequence[int]) -> None:
        for sources, destinations, sizes in segments(pieces, there):
            if self._engine.batch_transfer_sync_write(self._session, sources, destinations, sizes):
                raise SystemExit("Mooncake's transfer failed")

    def close(self) -> None: ...


def _nixl(regions: Regions) -> Any:
    """An agent without a progress thread, which would burn a core: both ends drive UCX while rows move."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ["UCX_TLS"] = "tcp,self"
    library = importlib.import_module("nixl_cu12._api")
    config = library.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
    agent = library.nixl_agent(secrets.token_hex(8), config)
    agent.register_memory([(address, size, 0, "") for address, size in spans(regions)], "DRAM", ["UCX"])
    return agent


class ReceivingNixl:
    def __init__(self, regions: Regions) -> None:
        self._agent = _nixl(regions)

    def describe(self) -> tuple[str, str]:
        return self._agent.name, self._agent.get_agent_metadata().hex()

    def prepare(self, pieces: Sequence[memoryview]) -> None: ...

    def serve(self) -> None:
        while not any(self._agent.get_new_notifs().values()):
            pass

    def close(self) -> None: ...


class SendingNixl:
    def __init__(self, regions: Regions, other: tuple[str, str]) -> None:
        self._agent = _nixl(regions)
        self._name, metadata = other
        self._agent.add_remote_agent(bytes.fromhex(metadata))

    def send(self, pieces: Sequence[memoryview], there: Sequence[int]) -> None:
        batches = list(segments(pieces, there))
        for index, (sources, destinations, sizes) in enumerate(batches):
            here = [(address, size, 0) for address, size in zip(sources, sizes, strict=True)]
            places = [(address, size, 0) for address, size in zip(destinations, sizes, strict=True)]
            note = b"done" if index == len(batches) - 1 else b""
            descriptors = self._agent.get_xfer_descs(here, "DRAM"), self._agent.get_xfer_descs(places, "DRAM")
            handle = self._agent.initialize_xfer("WRITE", *descriptors, self._name, note, ["UCX"])
            state = self._agent.transfer(handle)
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise SystemExit(f"NIXL's transfer ended as {state}")
            self._agent.release_xfer_handle(handle)

    def close(self) -> None: ...


RECEIVING: dict[str, Callable[[Regions], Receiving]] = {
    "socket": ReceivingSocket,
    "grpc": ReceivingGrpc,
    "mooncake": ReceivingMooncake,
    "nixl": ReceivingNixl,
}
SENDING: dict[str, Callable[[Regions, Any], Sending]] = {
    "socket": SendingSocket,
    "grpc": SendingGrpc,
    "mooncake": SendingMooncake,
    "nixl": SendingNixl,
}
