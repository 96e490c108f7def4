import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from service.config import ProcessConfig, Size, WorkerConfig, load, machine_memory_bytes, option
from twinpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig(WorkerConfig):
    port: int = option(7072, help="gRPC port", unit="port", minimum=0, maximum=65535)
    memory: Size = option(Size.parse("4GiB"), help="cache memory", unit="bytes")
    kv_dtype: str = option("int8", help="what the cache stores", choices=("int8", "bf16"))
    patience: float = option(1.5, help="about 50% of the wait", unit="s", minimum=0)
    swap: bool = option(True, help="move preempted sequences to host memory")
    batch: int = option(8, help="sequences a step", unit="sequences", minimum=1)


def read(*argv: str, env: dict[str, str] | None = None) -> SampleConfig:
    return load(SampleConfig, "decode", argv, env or {})


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "options.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_wins_over_environment_over_file_over_default(tmp_path):
    path = toml(tmp_path, "batch = 2\nhost = '10.0.0.1'\npatience = 7\n")
    env = {"TWINPOOL_BATCH": "3", "TWINPOOL_HOST": "10.0.0.2", "UNRELATED": "x"}
    config = read("--config", path, "--batch", "4", env=env)
    assert (config.batch, config.host, config.patience, config.kv_dtype) == (4, "10.0.0.2", 7.0, "int8")


def test_every_type_is_read_from_a_flag():
    config = read("--memory=1.5GiB", "--kv-dtype", "bf16", "--patience", "0.25", "--no-swap", "--routers", "a:1, b:2,")
    assert config.memory == 3 << 29
    assert (config.kv_dtype, config.patience, config.swap, config.routers) == ("bf16", 0.25, False, ("a:1", "b:2"))


def test_every_type_is_read_from_a_file(tmp_path):
    path = toml(tmp_path, "memory = 1024\npatience = 2\nswap = false\nrouters = ['a:1', 'b:2']\nmetrics_port = -1\n")
    config = read("--config", path)
    assert (config.memory, config.patience, config.swap, config.routers) == (1024, 2.0, False, ("a:1", "b:2"))
    assert config.metrics_port == -1


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("TRUE", True), ("off", False), ("no", False)])
def test_a_switch_is_read_from_the_environment(text, expected):
    assert read(env={"TWINPOOL_SWAP": text}).swap is expected


def test_one_file_configures_several_processes(tmp_path):
    path = toml(tmp_path, "log_level = 'debug'\nbatch = 1\n[decode]\nbatch = 5\n[router]\nno_option_of_decode = 1\n")
    config = read(env={"TWINPOOL_CONFIG": path})
    assert (config.log_level, config.batch) == ("debug", 5)


@pytest.mark.parametrize(
    ("argv", "env", "parts"),
    [
        (["--port", "70000"], {}, ["--port", "'70000'", "from 0 to 65535"]),
        (["--port", "7.5"], {}, ["--port", "'7.5'", "an integer"]),
        (["--batch", "0"], {}, ["--batch", "'0'", "at least 1"]),
        (["--patience", "nan"], {}, ["--patience", "'nan'", "at least 0"]),
        (["--memory", "4GB"], {}, ["--memory", "'4GB'", "4GiB"]),
        (["--kv-dtype", "int4"], {}, ["--kv-dtype", "'int4'", "one of int8, bf16"]),
        ([], {"TWINPOOL_SWAP": "maybe"}, ["TWINPOOL_SWAP", "'maybe'", "true or false"]),
        (["--bath", "3"], {}, ["'--bath'", "did you mean --batch"]),
        (["--memroy=3GiB"], {}, ["--memroy", "did you mean --memory"]),
        (["--frobnicate", "3"], {}, ["--frobnicate", "--help"]),
        (["stray"], {}, ["stray", "--help"]),
        (
            ["--bat", "3"],
            {},
            ["--bat", "did you mean"],
        ),  # no abbreviations: a new option must not change what they mean
        (["--port"], {}, ["--port", "expected one argument"]),
        ([], {"TWINPOOL_MEMROY": "1GiB"}, ["TWINPOOL_MEMROY", "did you mean TWINPOOL_MEMORY"]),
    ],
)
def test_a_bad_value_is_named_with_its_source_and_what_is_allowed(argv, env, parts):
    with pytest.raises(ConfigError) as caught:
        read(*argv, env=env)
    assert all(part in caught.value.message for part in parts), caught.value.message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("batch = '8x'", ["options.toml: batch", "'8x'", "at least 1"]),
        ("batch = 2.5", ["batch", "2.5"]),
        ("batch = true", ["batch", "True"]),
        ("host = 5", ["host", "5", "text"]),
        ("routers = [1]", ["routers", "comma separated"]),
        ("btach = 8", ["btach", "did you mean batch"]),
        ("decode = 5", ["options.toml", "decode is no table"]),
        ("[[decode]]\nbatch = 1", ["options.toml", "decode is no table"]),
        ("[decode]\nfrobnicate = 8", ["frobnicate", "no option of decode"]),
        ("[decod]\nbatch = 8", ["[decod]", "[decode]"]),
        ("config = 'other.toml'", ["options.toml", "only one"]),
        ("batch 8", ["not valid TOML", "line 1"]),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path, text, parts):
    with pytest.raises(ConfigError) as caught:
        read("--config", toml(tmp_path, text))
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_a_missing_file_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"/nowhere/options\.toml: No such file"):
        read("--config", "/nowhere/options.toml")


def test_environment_of_other_processes_and_of_kubernetes_is_left_alone():
    env = {
        "TWINPOOL_SHORT_LENGTH_TOKENS": "512",  # some other process' option
        "TWINPOOL_PORT_7070_TCP_ADDR": "10.0.0.1",  # what Kubernetes adds beside a service called twinpool
        "TWINPOOL_SERVICE_HOST": "10.0.0.1",
    }
    assert read(env=env) == SampleConfig()


def test_a_port_set_by_kubernetes_is_explained():
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        read(env={"TWINPOOL_PORT": "tcp://10.0.0.1:7070"})


def test_secrets_are_never_shown():
    config = read("--cluster-key", "hunter2")
    assert config.cluster_key == "hunter2"
    assert "hunter2" not in repr(config)


def test_a_bad_secret_is_not_echoed(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read("--config", toml(tmp_path, "cluster_key = 31337"))
    assert "31337" not in caught.value.message


def test_help_lists_unit_default_and_environment_name_of_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "about 50% of the wait [unit s; default 1.5; env TWINPOOL_PATIENCE]" in text
    assert "[unit bytes; default 4GiB; env TWINPOOL_MEMORY]" in text
    assert "[one of int8, bf16; default int8; env TWINPOOL_KV_DTYPE]" in text
    assert "--no-swap" in text
    for name in SampleConfig.__dataclass_fields__:
        assert f"env TWINPOOL_{name.upper()}]" in text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("4096", 4096), ("1_000", 1000), ("10B", 10), ("1KiB", 1024), ("2 MiB", 2 << 20), ("0.5GiB", 1 << 29)],
)
def test_sizes_are_read_in_binary_units(text, num_bytes):
    assert Size.parse(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "0.0", "4gb", "1e9", "4 GiB x", "٤"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="no size"):
        Size.parse(text)


@pytest.mark.parametrize("text", ["0", "4096", "3MiB", "4GiB", "1000"])
def test_a_size_prints_as_it_is_written(text):
    assert str(Size.parse(text)) == text.replace("4096", "4KiB")


def test_a_fraction_is_of_the_memory_of_this_machine():
    assert Size.parse("0.5") == machine_memory_bytes() // 2


def test_fields_without_option_are_a_programming_error():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Wrong(ProcessConfig):
        extra: dict[str, str] = option(None, help="no such type")

    with pytest.raises(TypeError, match=r"Wrong\.extra"):
        load(Wrong, "router", [], {})


def test_a_config_error_is_one_line_and_exit_status_2():
    program = (
        "from service.config import ProcessConfig, load, run_main\n"
        "run_main(lambda: print(load(ProcessConfig, 'router').port), 'router')\n"
    )
    bad = subprocess.run([sys.executable, "-c", program, "--port", "x"], capture_output=True, text=True, timeout=30)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "router: --port: 'x' is not allowed; expected an integer from 0 to 65535\n"
    good = subprocess.run([sys.executable, "-c", program, "--port", "7"], capture_output=True, text=True, timeout=30)
    assert (good.returncode, good.stdout) == (0, "7\n")
    with open("/dev/full", "w") as full:  # as when the log's disk is
        mute = subprocess.run([sys.executable, "-c", program, "--port", "x"], stderr=full, timeout=30)
    assert mute.returncode == 2


@pytest.mark.parametrize(
    ("config", "prog"), [(RouterConfig, "router"), (PrefillConfig, "prefill"), (DecodeConfig, "decode")]
)
def test_every_time_has_a_bound_that_timers_and_messages_can_hold(config: type[ProcessConfig], prog: str):
    times = [each.name for each in fields(config) if each.metadata["unit"] in ("s", "ms")]
    assert len(times) > 2
    for name in times:
        for value in ("inf", "nan", "5000000000"):
            flag = f"--{name.replace('_', '-')}"
            with pytest.raises(ConfigError) as caught:
                load(config, prog, ["--model", "m", f"{flag}={value}"], {})
            assert f"{flag}: '{value}' is not allowed; expected a" in caught.value.message
            assert " to " in caught.value.message
