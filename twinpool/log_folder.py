"""The folder with the logs of one local deployment: made anew for each, old ones removed, each log kept to a size.

Children write to files that they were given open, so a log that has grown too large is copied to NAME.log.1 and cut,
under their hands: they append, and go on at the new end. What is written between the last read and the cut, some
microseconds, is lost.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

from twinpool import errors

_KEPT_FOLDERS = 20
_FULL_BELOW_BYTES = 64 << 10


def new_folder(logs: Path) -> Path:
    """A folder below `logs` for this process. Raises ConfigError when it cannot be made."""
    folder = logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(path for path in logs.iterdir() if path.is_dir())[:-_KEPT_FOLDERS]:
            if not _is_running(old.name.rpartition("-")[2]):  # a deployment that has been up since long needs its logs
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise errors.ConfigError(f"cannot write logs under {logs}: {error.strerror}; set TWINPOOL_HOME") from error
    return folder


def older(log: Path) -> Path:
    """Where what a log held before it was cut is kept."""
    return log.with_name(f"{log.name}.1")


def cut(log: Path, most_bytes: int) -> bool:
    """Moves what a log holds to its older file, in place of what is there, if it has more than `most_bytes`.

    Returns whether it did. Raises OSError, with the log as it was, when there is no room to do so.
    """
    try:
        if log.stat().st_size <= most_bytes:
            return False
    except FileNotFoundError:
        return False
    kept = older(log)
    kept.unlink(missing_ok=True)  # first, for it makes the room that the next one needs
    try:
        with log.open("rb") as source, kept.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            while rest := source.read(1 << 20):  # written meanwhile
                target.write(rest)
                target.flush()
            os.truncate(log, 0)
    except OSError:
        kept.unlink(missing_ok=True)
        raise
    return True


def is_full(folder: Path) -> bool:
    """Whether the disk that `folder` is on has no room for more lines."""
    try:
        return shutil.disk_usage(folder).free < _FULL_BELOW_BYTES
    except OSError:
        return False


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ValueError:
        return False
    except OSError as error:
        return error.errno == errno.EPERM
    return True
