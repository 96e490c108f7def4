"""A prefill worker's transfer end as a process of its own: pushes one layer to the target it is given, then hangs.

With a number behind target and transport it begins a second layer and kills itself when more rows than that have left.
"""

from __future__ import annotations

import sys
import time

from kvtransfer import KvSender
from tests.fakes import Faults, injected
from tests.kvtransfer.peers import FINGERPRINT, KEY, make_regions, named


def main(parameter: str, target: bytes, kill_after_rows: int) -> None:
    transport, options = named(parameter)
    with injected(Faults(kill_after_rows=kill_after_rows)):
        sender = KvSender(
            make_regions(1), fingerprint=FINGERPRINT, cluster_key=KEY, transport=transport, options=options
        )
    push = sender.open(target, request_id="r1", attempt=1, timeout_s=60)
    push.put(0, range(4), range(4))
    if kill_after_rows:
        push.put(1, range(4), range(4))
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
