"""A link whose messages travel on a TCP link of ours, the control link, while its rows go another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtransfer import wire
from kvtransfer.transports.tcp import TcpLink


class ControlledLink:
    """Passes messages through. Each end adds how its rows move, and what it does after the handshake.

    What only the other end does raises TypeError.
    """

    one_sided: bool
    checksums_follow = False
    takes_several = False
    frame_share = 1

    def __init__(self, control: TcpLink) -> None:
        self.peer = control.peer
        self._control = control

    @property
    def lease_s(self) -> float:
        return self._control.lease_s

    def agree(self, lease_s: float) -> None:
        self._control.agree(lease_s)

    def beat(self) -> None:
        self._control.beat()

    def fileno(self) -> int:
        return self._control.fileno()

    def send(self, message: wire.Message, payload: Sequence[memoryview] = (), *, deadline: float) -> None:
        self._control.send(message, payload, deadline=deadline)

    def start(self, message: wire.Message, payload: Sequence[memoryview] = ()) -> None:
        self._control.start(message, payload)

    def advance(self) -> bool:
        return self._control.advance()

    def receive(self, *, deadline: float | None = None) -> wire.Frame:
        return self._control.receive(deadline=deadline)

    def receive_ready(self) -> list[wire.Message]:
        return self._control.receive_ready()

    def fill(self, destination: Sequence[memoryview]) -> None:
        self._control.fill(destination)

    def skip(self, num_bytes: int) -> None:
        self._control.skip(num_bytes)

    def share(self, *, deadline: float) -> None:
        raise TypeError("only the receiving end shares")

    def expect(self, row_bytes: Sequence[int]) -> None:
        raise TypeError("rows of other sizes are refused on this link")

    def attach(self, *, deadline: float) -> None:
        raise TypeError("only the sending end attaches")

    def write(self, region: int, rows: Sequence[int], sources: Sequence[memoryview], *, deadline: float) -> list[int]:
        raise TypeError("only the sending end of a one-sided link writes")

    def start_rows(
        self, message: wire.Put, rows: Sequence[memoryview], there: Sequence[int], *, deadline: float
    ) -> Sequence[int]:
        """Of a one-sided link."""
        checksums = self.write(message.region, there, rows, deadline=deadline)
        self.start(replace(message, checksums=wire.pack_u64(checksums)))
        return checksums

    def fill_rows(self, rows: Sequence[memoryview]) -> tuple[Sequence[int], Sequence[int]]:
        raise TypeError("only the receiving end of an in-band link receives rows")

    def fenced(self, timeout_s: float) -> bool:
        return True

    def drained(self, timeout_s: float) -> bool:
        return True

    def cut(self) -> None:
        self._control.cut()

    def close(self) -> None:
        self._control.close()
