"""One process of a local deployment: its command, its log, whether it serves, how it ended.

Children run in sessions of their own, so that Ctrl-C in a terminal reaches only `twinpool`, which then stops them in
order; and they are tethered (tether.py), so that none outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool import errors, log_folder

_PACKAGES = Path(__file__).resolve().parents[1]  # where router, prefill, decode... are installed beside twinpool
_TAIL_BYTES = 32768
_HINTS = {  # what ends a process by a signal that nobody need have sent
    signal.SIGKILL: "where nobody sent it, the kernel had no memory left (see dmesg): lower --memory",
    signal.SIGBUS: "a mapped file was cut or cannot be read: packed weights, the model, or their disk",
    signal.SIGILL: "this CPU lacks an instruction: set TWINPOOL_ISA",
}


def module_command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE`, without a look into the working directory: a folder called `router` there is not ours."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment, with which `module_command` finds our packages, and gRPC's core writes nothing into the logs."""
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
    return {"GRPC_VERBOSITY": "ERROR", **os.environ, **(extra or {}), "PYTHONPATH": path}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a process says about itself once it serves."""

    address: str  # HOST:PORT of its gRPC server
    metrics_port: int


class Child:
    """A process that is started, and started again, by one thread: the kernel ties it to the thread that started it."""

    def __init__(self, name: str, module: str, options: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log_file = folder / f"{name}.log"
        self.ready_file = folder / f"{name}.ready"
        self.options = list(options)
        self._module = module
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0  # where the log of the process that runs now begins

    def start(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        command = module_command(self._module, *self.options, "--ready-file", str(self.ready_file))
        tether = [sys.executable, "-S", str(Path(__file__).with_name("tether.py")), str(os.getpid())]
        with self.log_file.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                [*tether, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=module_environment(self._env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs; negative after a signal."""
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ready(self) -> Ready | None:
        """None until this very process serves."""
        try:
            state = json.loads(self.ready_file.read_text())
        except FileNotFoundError:
            return None
        if state["pid"] != self.pid:
            return None
        return Ready(address=state["address"], metrics_port=int(state["metrics_port"]))

    def terminate(self) -> None:
        if self._process is not None and self.running:
            self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        if self._process is not None and self.running:
            self._process.kill()
            self._process.wait()

    def death(self) -> errors.TwinpoolError:
        """Why it ended, as an error that shows its last words and where to read on."""
        words = self._last_words()
        status = self.status or 0
        if status == 2 and words:  # it could not start as configured, and says so in one line
            return errors.ConfigError(f"{words} (log: {self.log_file})")
        if not words:
            full = log_folder.is_full(self.log_file.parent)
            words = "its reason is lost, as there is no room for logs" if full else "it logged no reason"
        return errors.Internal(f"{self.name} {_ending(status)}: {words} (log: {self.log_file})")

    def _last_words(self) -> str:
        """Of the process that ended, and of none before it."""
        try:
            size = self.log_file.stat().st_size
            cut = size < self._log_begin  # since it started: its last words may be in the older file
            begin = 0 if cut else self._log_begin
            words = _words(self.log_file, begin)
            return words or (_words(log_folder.older(self.log_file), 0) if cut else "")
        except OSError as error:
            return f"its log cannot be read: {error.strerror}"


def _ending(status: int) -> str:
    """How a process with this exit status ended."""
    if status >= 0:
        return f"ended with status {status}"
    hint = _HINTS.get(-status, "")  # type: ignore[call-overload]
    return f"was ended by signal {-status} ({signal.Signals(-status).name}{'; ' if hint else ''}{hint})"


def _words(log_file: Path, begin: int) -> str:
    """The last message or traceback, else the last complaint, in the end of a log; it is searched from `begin` on."""
    with log_file.open("rb") as log:
        start = max(begin, log.seek(0, os.SEEK_END) - _TAIL_BYTES)
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    lines = [line for line in lines[1 if start > begin else 0 :] if line.strip()]  # the first is half a line then
    plain = [line for line in lines if not line.startswith("{")]  # a message or a traceback, not a log record
    return (plain or [event for line in lines if (event := _complaint(line))] or [""])[-1][:500]


def _complaint(line: str) -> str:
    """The event of a log record that says something is wrong, else nothing: a request served explains no end."""
    try:
        record = json.loads(line)
    except ValueError:
        return ""
    wrong = isinstance(record, dict) and record.get("level") in ("warning", "error", "critical")
    return str(record.get("event", "")) if wrong else ""


def wait_ready(children: Sequence[Child], timeout_s: float) -> None:
    """Returns when all of them serve; raises the first one's death, or DeadlineExceeded naming who is late."""
    end = time.monotonic() + timeout_s
    waiting = list(children)
    while waiting:
        for child in waiting:
            if not child.running:
                raise child.death()
        waiting = [child for child in waiting if child.ready is None]
        if waiting and time.monotonic() > end:
            late = ", ".join(f"{child.name} (log: {child.log_file})" for child in waiting)
            raise errors.DeadlineExceeded(f"not ready within {timeout_s:g} s: {late}; allow more with --start-timeout")
        if waiting:
            time.sleep(0.05)
