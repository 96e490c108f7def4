"""gRPC server streams read from a bare socket: a client that takes as little as possible of the cores it shares.

gRPC's own client costs several times what it measures: 60 to 150 us a message, on the cores of the server under test.
This one sends prepared frames, looks at the headers of those that come, and takes the messages out of DATA frames:
HTTP/2 (RFC 9113), as far as a server that behaves needs it. Windows are opened once, as wide as they get.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_INITIAL_WINDOW = 4  # the setting's number
_MOST = 2**31 - 1


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """RFC 7541, 6.2.2: a literal that is not indexed, without Huffman's code."""
    assert max(len(name), len(value)) < 127, "a length of several bytes"
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Call:
    """One server stream. `messages` counts them, `ended` is set at its end, for whatever reason."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self.on_message = on_message
        self.messages = 0
        self.ended = asyncio.Event()
        self.rest = b""  # of a message that is not whole yet


class Connection(asyncio.Protocol):
    """Made by `connect`; raises ConnectionError where a call is started after it was lost."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._next = 1
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._authority = ""

    @classmethod
    async def connect(cls, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        connection._authority = address
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _MOST))
        self._transport.write(_PREFACE + settings + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _MOST - 65535)))

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        for call in self._calls.values():
            call.ended.set()
        self._calls.clear()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def start(self, method: str, message: bytes, on_message: Callable[[bytes], None]) -> Call:
        """`on_message` gets the bytes of each message of the answer as it comes."""
        if self._transport is None:
            raise ConnectionError("the connection was lost")
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": self._authority}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        block = b"".join(_header(name, value) for name, value in headers.items())
        stream, self._next = self._next, self._next + 2
        call = self._calls[stream] = Call(on_message)
        body = b"\0" + struct.pack(">I", len(message)) + message
        self._transport.write(_frame(_HEADERS, _END_HEADERS, stream, block) + _frame(_DATA, _END_STREAM, stream, body))
        return call

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        at, length = 0, len(buffer)
        while length - at >= 9:
            end = at + 9 + int.from_bytes(buffer[at : at + 3])
            if end > length:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            self._frame(kind, flags, int.from_bytes(buffer[at + 5 : at + 9]), buffer[at + 9 : end])
            at = end
        self._buffer = buffer[at:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            call = self._calls.get(stream)
            if call is not None:
                self._messages(call, payload)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK and self._transport is not None:
            self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        if (kind in (_DATA, _HEADERS) and flags & _END_STREAM) or kind == _RST_STREAM:
            call = self._calls.pop(stream, None)
            if call is not None:
                call.ended.set()
        elif kind == _GOAWAY:
            self.close()

    def _messages(self, call: Call, payload: bytes) -> None:
        rest = call.rest + payload if call.rest else payload
        while len(rest) >= 5:
            end = 5 + int.from_bytes(rest[1:5])
            if end > len(rest):
                break
            call.messages += 1
            call.on_message(rest[5:end])
            rest = rest[end:]
        call.rest = rest
