"""The `twinpool` command against a router in this process: what it prints, how it ends."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from tests.twinpool.fake_router import TIMELINE, USAGE, FakeRouter, chunk, last_chunk, one_token_then_silence
from twinpool import __version__, errors
from twinpool.commands import bench, profile
from twinpool.commands.tables import timeline_table
from twinpool.launch import COMMANDS, main
from twinpool.results import Timeline, Usage
from twinpool.v1 import router_pb2 as v1

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(router: FakeRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run("generate", "hi", stdin=...) -> (exit status, stdout, stderr)."""
    monkeypatch.setenv("TWINPOOL_ROUTERS", router.address)

    def command(*arguments: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return command


# generate


def test_generate_prints_the_text_of_argument_or_stdin(run: Run, router: FakeRouter) -> None:
    assert run("generate", "What?") == (0, "Paris\n", "")
    assert run("generate", stdin="Où?\n") == (0, "Paris\n", "")
    assert run("generate", "--chat", "What?") == (0, "Paris\n", "")
    assert [request.text for request in router.requests] == ["What?", "Où?\n", ""]
    assert router.requests[2].chat.messages[0].content == "What?"


def test_generate_sends_the_flags_that_were_given(run: Run, router: FakeRouter) -> None:
    flags = "--max-tokens 5 --temperature 0 --top-p 0.5 --seed 7 --stop a --stop b --ignore-eos"
    run("generate", "hi", *flags.split(), "--sla-class", "batch", "--priority", "2", "--deadline-s", "9")
    request = router.requests[0]
    sent = {field.name for field, _ in request.sampling.ListFields()}
    assert sent == {"max_tokens", "temperature", "top_p", "seed", "stop", "ignore_eos"}
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (5, ["a", "b"])
    assert (request.sla_class, request.priority) == ("batch", 2)
    assert 0 < request.deadline_ms <= 9000


def test_generate_json_holds_all_of_the_answer(run: Run, router: FakeRouter) -> None:
    def with_logprobs(_request: Any, _context: Any) -> Iterator[v1.GenerateChunk]:
        message = chunk("é", 5, finish=v1.FINISH_REASON_STOP)
        message.choices[0].logprobs.add(token_id=5, logprob=-0.5, text=b"\xc3")
        yield message
        yield last_chunk()

    router.answer = with_logprobs
    status, out, _ = run("generate", "hi", "--json", "--logprobs", "0")
    answer = json.loads(out)
    assert status == 0
    assert (answer["text"], answer["choices"][0]["finish_reason"]) == ("é", "stop")
    assert answer["choices"][0]["logprobs"] == [{"token_id": 5, "logprob": -0.5, "top": [], "text": "\ufffd"}]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["timeline"]["decode_worker"] == "decode-0"


def test_generate_keeps_several_answers_apart(run: Run, router: FakeRouter) -> None:
    def two(_request: Any, _context: Any) -> Iterator[v1.GenerateChunk]:
        yield chunk("A", 1, index=0, finish=v1.FINISH_REASON_STOP)
        yield chunk("B", 2, index=1, finish=v1.FINISH_REASON_STOP)
        yield last_chunk()

    router.answer = two
    assert run("generate", "hi", "--n", "2")[1] == "--- 1 ---\nA\n--- 2 ---\nB\n"


# chat


def test_chat_keeps_history_clears_and_exits(run: Run, router: FakeRouter) -> None:
    status, out, err = run("chat", "--system", "Be brief.", stdin="one\n\ntwo\n/clear\n/nope\nthree\n/exit\nfour\n")
    assert (status, out) == (0, "Paris\nParis\nParis\n")
    assert "/nope" in err
    asked = [[(m.role, m.content) for m in request.chat.messages] for request in router.requests]
    system = ("system", "Be brief.")
    assert asked == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "Paris"), ("user", "two")],
        [system, ("user", "three")],
    ]


def test_chat_samples_calmly_unless_told_otherwise(run: Run, router: FakeRouter) -> None:
    run("chat", stdin="one\n")
    run("chat", "--temperature", "1.5", stdin="one\n")
    assert [round(request.sampling.temperature, 3) for request in router.requests] == [0.6, 1.5]
    assert [round(request.sampling.top_p, 3) for request in router.requests] == [0.9, 0.9]


def test_chat_from_a_pipe_ends_at_the_first_error(run: Run, router: FakeRouter) -> None:
    router.fail_with = [errors.InvalidRequest("messages are too long")]
    status, out, err = run("chat", stdin="one\ntwo\n")
    assert (status, out, err) == (2, "", "twinpool: messages are too long\n")


def test_chat_in_a_terminal_goes_on_after_errors_and_ctrl_c(router: FakeRouter) -> None:
    router.fail_with = [errors.InvalidRequest("too long")]
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "twinpool", "chat", "--router", router.address]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    try:
        screen = ""

        def until(text: str) -> None:
            nonlocal screen
            while text not in screen:
                screen += os.read(terminal, 4096).decode(errors="replace")
            screen = screen.partition(text)[2]

        until("> ")
        os.write(terminal, b"one\n")
        until("twinpool: too long")
        until("> ")
        os.write(terminal, b"two\n")
        until("Paris")
        until("> ")
        router.answer = one_token_then_silence
        os.write(terminal, b"three\n")
        until("three\r\n")  # the terminal's echo
        until("a")
        process.send_signal(signal.SIGINT)
        until("[stopped]")
        assert router.cancelled.wait(5)
        until("> ")
        os.write(terminal, b"/exit\n")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert len(router.requests) == 3


# the smaller ones


def test_pools_shows_every_worker(run: Run, router: FakeRouter) -> None:
    worker = v1.WorkerStatus(
        worker_id="decode-7", pool=v1.POOL_DECODE, address="127.0.0.1:7072", state=v1.WORKER_STATE_DRAINING
    )
    worker.running, worker.rows_free, worker.rows_total, worker.tokens_per_s, worker.age_s = 3, 40, 64, 12.34, 3725
    size = v1.PoolSize(pool=v1.POOL_DECODE, current=1, desired=4, load=2.5, reason="so many answers")
    router.pools = v1.GetPoolsResponse(workers=[worker], queued=5, running=3, sizes=[size])
    status, out, _ = run("pools")
    assert status == 0
    for part in ("decode-7", "draining", "127.0.0.1:7072", "40", "64", "12.3", "1h02m", "5 queued, 3 running"):
        assert part in out
    assert "decode: 1 joined, 4 desired (so many answers)" in out
    answer = json.loads(run("pools", "--json")[1])
    assert answer["workers"][0]["rows_free"] == 40
    assert (answer["sizes"][0]["pool"], answer["sizes"][0]["desired"]) == ("decode", 4)


def test_explain_shows_every_candidate_and_the_choice(run: Run, router: FakeRouter) -> None:
    status, out, _ = run("explain", "req-7")
    assert status == 0
    for part in ("batch", "policy predict", "chosen", "p1", "p0", "12.5 ms", "99.0 ms", "21.0 ms", "least latency"):
        assert part in out
    (decision,) = json.loads(run("explain", "req-7", "--json")[1])
    assert decision["request_id"] == "req-7"
    assert [pair["prefill_worker"] for pair in decision["candidates"]] == ["p1", "p0"]


def test_pools_names_a_worker_that_fits_nobody(run: Run, router: FakeRouter) -> None:
    def pool(**fingerprints: str) -> None:
        router.pools = v1.GetPoolsResponse(
            workers=[
                v1.WorkerStatus(
                    worker_id=name,
                    pool=v1.POOL_PREFILL if name.startswith("p") else v1.POOL_DECODE,
                    state=v1.WORKER_STATE_READY,
                    fingerprint=fingerprint,
                )
                for name, fingerprint in fingerprints.items()
            ]
        )

    pool(p0="a", d0="a", d1="b")
    assert "d1 fits no prefill worker" in run("pools")[1]
    pool(p0="a", p1="b", d0="a")
    assert "p1 fits no decode worker" in run("pools")[1]
    for fingerprints in ({"p0": "a", "d0": "a"}, {"p0": "a", "p1": "b"}, {"p0": "a", "d0": "b"}):
        pool(**fingerprints)
        assert "fits no" not in run("pools")[1]


Wait = Callable[[Callable[[], bool]], None]  # until the condition holds, for a while


def watch_pools(router: FakeRouter, look_on: Callable[[Wait], None]) -> str:
    """What `pools --watch` prints until Ctrl-C ends it, after look_on."""
    command = [sys.executable, "-m", "twinpool", "pools", "--watch", "--interval", "0.05", "--router", router.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 20

    def wait(condition: Callable[[], bool]) -> None:
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)

    try:
        look_on(wait)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in err
    return out


def test_pools_watch_goes_on_until_ctrl_c(router: FakeRouter) -> None:
    out = watch_pools(router, lambda wait: wait(lambda: router.num_pool_calls >= 3))
    assert "queued" in out


def test_pools_watch_outlives_a_router_that_is_away_for_a_while(router: FakeRouter) -> None:
    def look_on(wait: Wait) -> None:
        wait(lambda: router.num_pool_calls >= 2)
        router.fail_with = [errors.DeadlineExceeded("no pools today") for _ in range(3)]
        wait(lambda: not router.fail_with)
        seen = router.num_pool_calls
        wait(lambda: router.num_pool_calls >= seen + 3)

    out = watch_pools(router, look_on)
    assert "queued" in out  # what was shown last


@pytest.mark.parametrize("wait", ["nan", "-3", "1e9"])
def test_drain_refuses_a_wait_that_is_none_before_any_worker_hears_of_it(
    run: Run, dead_address: str, wait: str
) -> None:
    status, _, err = run("drain", "decode-0", f"--wait={wait}", "--router", dead_address)
    assert status == 2
    assert "--wait" in err
    assert "0 to 86400 seconds" in err


@pytest.mark.parametrize("interval", ["nan", "-1", "1e9"])
def test_pools_refuses_an_interval_that_is_none(run: Run, interval: str) -> None:
    status, _, err = run("pools", "--watch", f"--interval={interval}")
    assert (status, err.count("\n")) == (2, 1)
    assert "--interval" in err


def test_tokenize_and_back(run: Run) -> None:
    assert run("tokenize", "ab") == (0, "1 97 98\n", "")
    assert run("tokenize", "--decode", "97, 98") == (0, "ab\n", "")
    assert run("tokenize", "--chat", stdin="ab") == (0, "97 98\n", "")
    assert run("tokenize", "--decode", "x")[0] == 2


def test_models_served_and_known(run: Run) -> None:
    assert "2048" in run("models")[1]
    assert "smollm2-135m-instruct" in run("models", "--known")[1]


def test_version_both_ways(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == (0, f"twinpool {__version__}\n", "")
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"twinpool {__version__}\n"


@pytest.mark.parametrize(
    "command", [module.__name__.rpartition(".")[2] for module in COMMANDS if module not in (bench, profile)]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: twinpool {command}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "option"), [("bench", "--rate"), ("profile", "--phase")])
def test_bench_and_profile_hand_their_arguments_on(name: str, option: str) -> None:
    command = [sys.executable, "-m", "twinpool", name, "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    assert option in answer.stdout


# how it fails


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequest("top_p is 3: allowed is over 0 to 1", field="top_p"), 2),
        (errors.UnknownModel("no model is called x"), 2),
        (errors.Internal("internal error 1234"), 1),
        (errors.DeadlineExceeded("too late"), 1),
    ],
)
def test_an_error_is_one_line_and_a_status(
    run: Run, router: FakeRouter, error: errors.TwinpoolError, status: int
) -> None:
    router.fail_with = [error]
    assert run("generate", "hi") == (status, "", f"twinpool: {error.message}\n")


@pytest.mark.parametrize("command", [("pools",), ("explain", "r-1"), ("drain", "decode-0"), ("generate", "hi")])
def test_no_router_is_one_line_that_says_what_to_do(run: Run, dead_address: str, command: tuple[str, ...]) -> None:
    status, out, err = run(*command, "--router", dead_address)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert dead_address in err
    assert "twinpool up" in err


@pytest.mark.parametrize("command", ["generate", "chat", "tokenize"])
def test_stdin_that_is_not_utf8_is_refused(run: Run, command: str) -> None:
    status, out, err = run(command, stdin=b"caf\xe9\n")
    assert (status, out) == (2, "")
    assert "UTF-8" in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--prefill", "-1"], "--prefill -1"),
        (["--cores", "a-b"], "--cores"),
        (["--cores", "100000"], "--cores"),
        (["--cores", "0-10000000000"], "--cores"),
        (["--start-timeout", "nan"], "--start-timeout nan"),
    ],
)
def test_up_refuses_what_cannot_work(run: Run, tmp_path: Any, arguments: list[str], part: str) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("")
    status, _, err = run("up", "--model", str(tmp_path), *arguments)
    assert status == 2
    assert part in err
    assert err.count("\n") == 1


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "hi", "--temprature", "1"])
    assert caught.value.code == 2
    assert "--temprature" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(router: FakeRouter) -> None:
    router.answer = one_token_then_silence
    command = [sys.executable, "-m", "twinpool", "generate", "hi", "--router", router.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, b"")
    assert router.cancelled.wait(5)


def test_a_reader_that_has_seen_enough_is_no_error(router: FakeRouter) -> None:
    def long(_request: Any, _context: Any) -> Iterator[v1.GenerateChunk]:
        for _ in range(2000):
            yield chunk("line of text\n" * 100, 7)
        yield chunk("", finish=v1.FINISH_REASON_LENGTH)
        yield last_chunk()

    router.answer = long
    shell = f"{sys.executable} -m twinpool generate hi --router {router.address} | head -1"
    answer = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=30, check=False)
    assert (answer.stdout, answer.stderr) == ("line of text\n", "")


def test_the_timeline_shows_every_span() -> None:
    line = Timeline(**{field.name: getattr(TIMELINE, field.name) for field in dataclasses.fields(Timeline)})
    usage = Usage(**{field.name: getattr(USAGE, field.name) for field in dataclasses.fields(Usage)})
    out = io.StringIO()
    Console(file=out, width=120).print(timeline_table(line, usage))
    for part in (
        "queued",
        "1.0 ms",
        "prefill",
        "20.0 ms",
        "transfer",
        "4,096 bytes",
        "TTFT",
        "24.0 ms",
        "TPOT",
        "166.7",
    ):
        assert part in out.getvalue()


def test_convert_fails_in_one_line(run: Run, tmp_path: Any) -> None:
    status, out, err = run("convert", str(tmp_path / "none.gguf"), str(tmp_path / "target"))
    assert (status, out) == (2, "")
    assert "none.gguf" in err
    assert not (tmp_path / "target").exists()


def test_convert_describes_a_model_from_its_config_alone(run: Run, tmp_path: Any) -> None:
    sizes = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    config = {"model_type": "qwen2", "vocab_size": 152064, "intermediate_size": 18944} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, _ = run("convert", "--describe", str(tmp_path), "--context", "2048", "--memory", "3.5")
    assert status == 0
    assert "57,344" in out  # bytes a token of Qwen2.5-7B, as published
    assert out.splitlines()[-1].split()[-5:-1] == ["in", "3.5", "GiB", "32"]
    status, _, err = run("convert", "--describe", str(tmp_path / "none"))
    assert status != 0
    assert "no model directory" in err
    assert run("convert", str(tmp_path / "a.gguf"))[0] != 0
