"""`twinpool up` and `twinpool demo` with real processes: they serve, they are looked after, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests import tiny_models
from twinpool import Client, log_folder, model_store
from twinpool.child import Child
from twinpool.deployment import Deployment, DeploymentSpec, parse_cores, split_cores, usable_cores
from twinpool.errors import ConfigError, TwinpoolError, Unavailable
from twinpool.v1 import router_pb2 as v1
from twinpool.v1.router_pb2_grpc import RouterStub

pytestmark = pytest.mark.flow
SMALL = {"dtype": "fp32", "memory": "8MiB", "block-size": "16"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWINPOOL_HOME", str(tmp_path))
    return tmp_path


class Up:
    """A `twinpool up` that is running; its lines on stderr, as they come."""

    def __init__(self, *arguments: str, home: Path) -> None:
        command = [sys.executable, "-m", "twinpool", "up", "--port", "0", "--metrics-port", "0", *arguments]
        for name, value in SMALL.items():
            command += [f"--{name}", value]
        self.home = home
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=home)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def wait_for(self, text: str) -> str:
        """The first line with `text` in it."""

        def found() -> str:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            line = next((line for line in self.lines if text in line), "")
            assert line or not ended, f"it ended without saying {text!r}: {self.lines}"
            return line

        return wait_until(found, f"{text!r} on stderr")

    @property
    def address(self) -> str:
        line = self.wait_for("is served at")
        return line.partition("is served at ")[2].partition(": ")[0]

    @property
    def pids(self) -> dict[str, int]:
        return {path.stem: json.loads(path.read_text())["pid"] for path in self.home.glob("logs/*/*.ready")}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)


@pytest.fixture
def up(home: Path, tiny_model: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up("--model", str(tiny_model), *arguments, home=home))
        return started[-1]

    yield start
    for each in started:
        each.end()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return value


def joined(client: Client) -> int:
    """How many workers are ready; none while there is no router."""
    try:
        return sum(worker.state == "ready" for worker in client.pools().workers)
    except Unavailable:
        return 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_up_serves_restarts_what_was_killed_and_leaves_nothing_at_sigterm(up: Callable[..., Up]) -> None:
    ours = up("--prefill", "1", "--decode", "1", "--model-name", "tiny", "--log-mib", "0.004")
    with Client(ours.address, timeout_s=60) as client:
        assert client.models()[0].name == "tiny"
        for _ in range(4):  # 2 KB of log each
            assert len(client.generate([11, 12], max_tokens=4, ignore_eos=True).token_ids) == 4
        wait_until(lambda: any(ours.home.glob("logs/*/router.log.1")), "the router's log is cut")
        before = ours.pids
        os.kill(before["decode-0"], signal.SIGKILL)
        ours.wait_for("decode-0 was ended by signal 9 (SIGKILL; where nobody sent it, the kernel had no memory left")
        ours.wait_for("decode-0 started again")
        wait_until(lambda: ours.pids.get("decode-0", before["decode-0"]) != before["decode-0"], "a new decode-0")
        wait_until(lambda: joined(client) == 2, "both workers ready")
        assert len(client.generate([11, 12], max_tokens=4, ignore_eos=True).token_ids) == 4
        os.kill(before["router"], signal.SIGKILL)
        ours.wait_for("router started again")  # where clients and workers know it
        wait_until(lambda: joined(client) == 2, "both workers found the new router")
        assert len(client.generate([11, 12], max_tokens=4, ignore_eos=True).token_ids) == 4
    pids = ours.pids
    assert sorted(pids) == ["decode-0", "prefill-0", "router"]
    ours.process.send_signal(signal.SIGTERM)
    assert ours.process.wait(60) == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in pids.values())


def test_a_worker_that_was_drained_is_not_started_again(up: Callable[..., Up]) -> None:
    ours = up("--prefill", "1", "--decode", "2")
    with Client(ours.address, timeout_s=60) as client:
        assert client.models()
        os.kill(ours.pids["decode-1"], signal.SIGTERM)
        ours.wait_for("decode-1 has left")
        wait_until(lambda: joined(client) == 2, "the other two are there")
        assert len(client.generate([11, 12], max_tokens=4, ignore_eos=True).token_ids) == 4
        time.sleep(1.0)  # longer than the wait before a restart
        assert ours.process.poll() is None
        assert [line for line in ours.lines if "decode-1 started again" in line or "starting it again" in line] == []


def test_the_death_of_a_child_shows_no_half_of_a_log_record(tmp_path: Path) -> None:
    child = Child("router", "router", (), tmp_path, {})
    request = json.dumps({"level": "info", "event": "request", "padding": "x" * 1000}) + "\n"
    child.log_file.write_text(request * 50)
    assert "request" not in child.death().message
    assert "it logged no reason" in child.death().message
    warning = json.dumps({"level": "warning", "event": "the device thread died"}) + "\n"
    child.log_file.write_text(request * 50 + warning + request)
    assert "the device thread died" in child.death().message
    child.log_file.unlink()
    assert "log cannot be read" in child.death().message


def test_the_death_of_a_child_is_not_explained_by_an_earlier_one(tmp_path: Path) -> None:
    child = Child("router", "router", ("--no-such-option", "1"), tmp_path, {})
    child.log_file.write_text("an earlier death\n")
    child.start()
    assert child.wait(60)
    assert "--no-such-option" in child.death().message
    log_folder.cut(child.log_file, 1)
    assert "--no-such-option" in child.death().message  # its last words were cut with the rest of the log
    child.log_file.write_text("an earlier death\n")
    child.options = ["--help"]
    child.start()
    assert child.wait(60)
    assert "an earlier death" not in child.death().message


def test_a_reason_that_is_lost_on_a_full_disk_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child("router", "router", (), tmp_path, {})
    child.log_file.touch()
    monkeypatch.setattr(log_folder, "is_full", lambda _folder: True)
    assert "there is no room for logs" in child.death().message


def test_trouble_with_logs_is_reported_once_and_so_is_its_end(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    deployment = Deployment(DeploymentSpec(model=tiny_model, model_name="tiny"), said.append)
    for full in (False, True, True, False, False):
        monkeypatch.setattr(log_folder, "is_full", lambda _folder, full=full: full)
        deployment._check_logs()
    assert [line.partition(": ")[2] for line in said] == [
        "there is no room for log lines, they are lost",
        "logs are written again",
    ]


def test_ctrl_c_stops_all_of_it_and_no_log_holds_a_secret(
    up: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINPOOL_CLUSTER_KEY", "cluster-secret")
    monkeypatch.setenv("TWINPOOL_LOG_LEVEL", "debug")
    ours = up()
    ours.wait_for("Ctrl-C stops")
    pids = ours.pids
    with grpc.insecure_channel(ours.address) as channel:
        request = v1.GenerateRequest(text="client-secret", sampling=v1.Sampling(max_tokens=2, stop=["client-secret"]))
        RouterStub(channel).Generate(request, metadata=(("x-api-key", "api-secret"),), timeout=60)
    ours.process.send_signal(signal.SIGINT)
    assert ours.process.wait(60) == 130
    assert not any(alive(pid) for pid in pids.values())
    assert not any("Traceback" in line for line in ours.lines)
    logs = "".join(path.read_text() for path in ours.home.glob("logs/*/*.log"))
    assert '"event": "request"' in logs
    assert "secret" not in logs


def test_no_child_outlives_an_up_that_was_killed(up: Callable[..., Up]) -> None:
    ours = up()
    ours.wait_for("Ctrl-C stops")
    pids = ours.pids
    ours.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in pids.values()), "all children gone", 30)


def test_a_port_in_use_is_one_line(up: Callable[..., Up]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ours = up("--port", port)
        assert ours.process.wait(60) == 2
    last = ours.wait_for("twinpool: ")
    assert port in last
    assert "--port" in last


def test_a_worker_that_cannot_start_fails_all_of_it(up: Callable[..., Up], tmp_path: Path) -> None:
    broken = tiny_models.make(tmp_path / "broken", "llama")
    (broken / "model.safetensors").write_bytes(b"nothing of use")
    ours = up("--model", str(broken))
    assert ours.process.wait(90) == 2
    assert "model.safetensors" in ours.wait_for("twinpool: ")
    wait_until(lambda: not any(alive(pid) for pid in ours.pids.values()), "all children gone", 30)


def test_a_folder_called_router_where_up_is_run_is_not_taken_for_ours(up: Callable[..., Up], home: Path) -> None:
    (home / "router").mkdir()
    (home / "router" / "__main__.py").write_text("raise SystemExit('not ours')")
    assert up("--prefill", "0", "--decode", "0").address


def test_a_child_that_does_not_stop_is_killed(tiny_model: Path) -> None:
    said: list[str] = []
    spec = DeploymentSpec(model=tiny_model, model_name="tiny", prefill=1, decode=0, worker_options=SMALL)
    with Deployment(spec, said.append) as deployment:
        deployment.start(60)
        router, worker = deployment.children
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        deployment.stop(grace_s=2)
        assert not router.running
        assert worker.status == -signal.SIGKILL
    assert any("did not stop" in line for line in said)


def test_a_start_that_takes_too_long_says_who_is_late(tiny_model: Path) -> None:
    spec = DeploymentSpec(model=tiny_model, model_name="tiny", worker_options=SMALL)
    with Deployment(spec, lambda _line: None) as deployment:
        with pytest.raises(TwinpoolError, match=r"router .*log.*--start-timeout"):
            deployment.start(0.01)
    assert not any(child.running for child in deployment.children)


def test_logs_of_a_deployment_that_still_runs_are_kept(tiny_model: Path, home: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for number in range(25):
        (home / "logs" / f"20200101-0000{number:02}-{gone.pid if number else os.getpid()}").mkdir(parents=True)
    Deployment(DeploymentSpec(model=tiny_model, model_name="tiny"), lambda _line: None)
    left = sorted(path.name for path in (home / "logs").iterdir())
    assert len(left) == 21
    assert left[0] == f"20200101-000000-{os.getpid()}"


def test_cores_are_split_evenly_or_not_at_all() -> None:
    assert split_cores((0, 1, 2, 3, 4), 2) == [(0, 1, 2), (3, 4)]
    assert split_cores((4, 7), 2) == [(4,), (7,)]
    assert split_cores((0,), 2) == [(), ()]
    assert split_cores((0, 1), 0) == []


def test_cores_are_read_as_ranges() -> None:
    first = usable_cores()[0]
    assert parse_cores(f"{first}-{first}, {first}") == (first,)
    for text in ("x", "3-", "99999", ",", "2-1"):
        with pytest.raises(ConfigError, match="--cores"):
            parse_cores(text)


@pytest.mark.model
@pytest.mark.timeout(600)  # the first run fetches and converts the model
def test_the_demo_answers_paris(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINPOOL_HOME")
    answer = subprocess.run(
        [sys.executable, "-m", "twinpool", "demo"], capture_output=True, text=True, timeout=580, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout
    for span in ("queued", "prefill", "transfer", "TTFT", "TPOT", "tokens/s"):
        assert span in answer.stdout
    assert model_store.home().is_dir()
