"""What bench.memory makes of a process' mappings, and what bench.online says of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.memory import CACHE, LIBRARIES, OWN, WEIGHTS, Watch, resident
from bench.online import decode_worker_memory

SMAPS = """\
55dff88f1000-55dffe0b6000 rw-p 00000000 00:00 0                          [heap]
Size:                100 kB
Rss:                  90 kB
Anonymous:            80 kB
VmFlags: rd wr mr mw me ac sd
7ff100000000-7ff140000000 rw-s 00000000 00:01 2058                       /memfd:twinpool-kv (deleted)
Rss:                1000 kB
Anonymous:             0 kB
7ff150000000-7ff160000000 r--p 00001000 fd:00 17                         /models/a model/x-bf16.packed
Rss:                 500 kB
Anonymous:             0 kB
7ff170000000-7ff170001000 r-xp 00000000 fd:00 18                         /lib/libc.so.6
Rss:                  40 kB
Anonymous:             3 kB
7ff180000000-7ff180001000 rw-p 00000000 00:00 0
Rss:                   7 kB
Anonymous:             7 kB
"""


def test_mappings_are_counted_by_what_they_hold() -> None:
    held = {kind: num_bytes // 1024 for kind, num_bytes in resident(SMAPS).items()}
    assert held == {OWN: 80 + 3 + 7, CACHE: 1000, WEIGHTS: 500, LIBRARIES: 10 + 37}


def test_memory_for_preempted_sequences_is_configured_and_not_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_SWAP", "64MiB")
    held = decode_worker_memory({OWN: 350_000_000, CACHE: 1_000_000, WEIGHTS: 2_000_000, LIBRARIES: 3_000_000})
    assert held["decode_worker_memory_mb"] == round(350 - 1.048576 * 64, 1)
    assert held["decode_worker_swap_mb"] == round(1.048576 * 64, 1)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is mapped")
def test_a_watch_sees_what_a_process_came_to_hold() -> None:
    with Watch(os.getpid()) as watch:
        before = resident(Path("/proc/self/smaps").read_text())[OWN]
        taken = bytearray(os.urandom(1 << 20)) * 64
    assert watch.most[OWN] >= before + len(taken) // 2
    with Watch(2**22 + 1) as nobody:
        pass
    assert nobody.most == {}
