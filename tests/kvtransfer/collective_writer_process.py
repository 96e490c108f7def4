"""A prefill worker's transfer end that is slow: the header of a frame is out long before its rows are offered."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from kvtransfer import KvSender
from kvtransfer.transports.process_group import GroupOfTwo
from tests.kvtransfer.peers import FINGERPRINT, KEY, Ends, make_regions

_send = GroupOfTwo.send


def send_late(group: GroupOfTwo, rows: Sequence[memoryview], timeout_s: float) -> None:
    print("the header is out", flush=True)
    time.sleep(0.5)  # it is stopped meanwhile
    _send(group, rows, timeout_s)


def main(target: bytes) -> None:
    GroupOfTwo.send = send_late  # type: ignore[method-assign]
    sender = KvSender(make_regions(1), fingerprint=FINGERPRINT, cluster_key=KEY, transport="collective")
    push = sender.open(target, request_id="r1", attempt=1, timeout_s=60)
    push.put(0, range(8), range(8))
    done = Ends()
    push.commit(b"", done)
    print(type(done.wait().error).__name__, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(bytes.fromhex(sys.argv[1]))
