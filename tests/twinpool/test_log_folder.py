"""Logs of a local deployment stay within a size and lose nothing that was written before they were cut."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from twinpool import log_folder


def test_a_log_within_its_size_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text("0123456789")
    assert not log_folder.cut(log, 10)
    assert not log_folder.cut(tmp_path / "none.log", 10)
    assert [path.name for path in tmp_path.iterdir()] == ["router.log"]


def test_a_process_writes_on_while_its_log_is_cut_again_and_again(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    program = "import sys, time\nfor i in range(300):\n    print(i, file=sys.stderr)\n    time.sleep(0.002)"
    with log.open("ab") as file:
        writer = subprocess.Popen([sys.executable, "-c", program], stderr=file)
    seen: list[str] = []
    while writer.poll() is None:
        if log_folder.cut(log, 100):
            seen += log_folder.older(log).read_text().splitlines()
        time.sleep(0.01)
    seen += log.read_text().splitlines()
    assert writer.returncode == 0
    # All there is, in order; of each cut one line at most may have been written in the instant before it.
    assert seen == [str(number) for number in range(300) if str(number) in set(seen)]
    assert len(seen) >= 290
    assert log.stat().st_size <= 1000


def test_a_log_that_cannot_be_moved_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text("0123456789")
    log_folder.older(log).symlink_to("/dev/full")  # is removed, and so no obstacle
    assert log_folder.cut(log, 1)
    assert log_folder.older(log).read_text() == "0123456789"
    log.write_text("abc")
    log_folder.older(log).unlink()
    log_folder.older(log).mkdir()
    with pytest.raises(OSError, match=r"router\.log\.1"):
        log_folder.cut(log, 1)
    assert log.read_text() == "abc"


def test_a_disk_is_full_when_there_is_no_room_for_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    assert not log_folder.is_full(tmp_path)
    assert not log_folder.is_full(tmp_path / "gone")
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: usage(free=4096))
    assert log_folder.is_full(tmp_path)
