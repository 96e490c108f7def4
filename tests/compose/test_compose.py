"""The stack's files against the processes they start; `make compose` runs the stack itself."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from service.config import load
from service.metrics import new_registry, serve_metrics

ROOT = Path(__file__).parents[2]
CONFIGS = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}


class Loader(yaml.SafeLoader):
    """Knows Compose's own tag for "not this one of the file before"."""


Loader.add_constructor("!reset", lambda loader, node: None)


def services(file: str) -> dict[str, dict]:
    """The services of a compose file, with every variable at its default, or "given" where one must be set."""
    text = (ROOT / "compose" / file).read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    text = re.sub(r"\$\{\w+:\?[^}]*\}", "given:1", text)
    return yaml.load(text, Loader)["services"]


def environment(process: str, *files: str) -> dict[str, str]:
    merged = {}
    for file in files:
        merged |= services(file)[process]["environment"]
    return {name: str(value if value is not None else "") for name, value in merged.items()}


@pytest.mark.parametrize("process", CONFIGS)
@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "hosts.yaml")], ids=["one host", "hosts"])
def test_every_variable_is_an_option_of_the_process_it_is_given_to(process, files):
    env = environment(process, *files)
    fields = CONFIGS[process].__dataclass_fields__
    assert {name for name in env if name.removeprefix("TWINPOOL_").lower() not in fields} == set()
    config = load(CONFIGS[process], process, [], env)
    assert config.host == "0.0.0.0"
    assert config.cluster_key == "given:1"


@pytest.mark.parametrize("process", CONFIGS)
def test_a_container_s_health_is_probed_where_the_process_answers(process):
    service = services("compose.yaml")[process]
    assert service["command"] == ["python", "-m", process]
    assert service["healthcheck"]["test"] == ["CMD", "healthz"]
    default = CONFIGS[process].__dataclass_fields__["metrics_port"].default
    assert int(service["environment"]["TWINPOOL_METRICS_PORT"]) == default


def test_the_router_is_published_on_its_own_port_and_on_loopback():
    (published,) = services("compose.yaml")["router"]["ports"]
    assert published == f"127.0.0.1:7070:{RouterConfig.__dataclass_fields__['port'].default}"


def test_a_worker_stops_within_the_time_it_is_given_to_drain():
    for process, config in CONFIGS.items():
        grace_s = int(services("compose.yaml")[process]["stop_grace_period"].removesuffix("s"))
        fields = config.__dataclass_fields__
        drain = fields["drain"] if process == "router" else fields["drain_timeout"]
        assert grace_s > drain.default


def test_the_image_holds_every_package():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {package.partition(".")[0] for package in packages}
    dockerfile = (ROOT / "compose/Dockerfile").read_text()
    assert {folder for folder in folders if f"COPY {folder}/ {folder}/\n" not in dockerfile} == set()
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert {folder for folder in folders if f"!{folder}" not in ignore} == set()


@pytest.mark.parametrize(("healthy", "status"), [(True, 0), (False, 1)])
def test_healthz_says_what_the_process_says(healthy, status):
    server = serve_metrics("127.0.0.1", 0, new_registry(), healthy=lambda: healthy)
    try:
        env = {**os.environ, "TWINPOOL_METRICS_PORT": str(server.port)}
        probe = subprocess.run([ROOT / "compose/healthz"], env=env, capture_output=True, timeout=30)
        assert probe.returncode == status
    finally:
        server.close()


def test_healthz_fails_where_nobody_listens():
    server = serve_metrics("127.0.0.1", 0, new_registry())
    server.close()
    env = {**os.environ, "TWINPOOL_METRICS_PORT": str(server.port)}
    assert subprocess.run([ROOT / "compose/healthz"], env=env, capture_output=True, timeout=30).returncode != 0


def test_the_check_says_so_where_no_docker_is(tmp_path):
    for name in ("bash", "dirname"):  # all that a PATH without docker needs
        (tmp_path / name).symlink_to(shutil.which(name))
    command = [shutil.which("bash"), ROOT / "compose/check.sh"]
    check = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30)
    assert check.returncode == 0
    assert "no Docker engine" in check.stdout
