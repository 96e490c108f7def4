"""What the product's source never does, whatever it is asked for: read it, rather than trust it."""

from __future__ import annotations

import ast
import dataclasses
import typing
from pathlib import Path

import pytest

from decode.config import DecodeConfig
from kvtransfer import wire
from prefill.config import PrefillConfig
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("twinpool", "service", "router", "prefill", "decode", "kvtransfer", "engine")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.parent.name != "v1")
MODULES_THAT_RUN_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
CALLS_THAT_RUN_DATA = {"eval", "exec", "compile", "__import__"}
METHODS_THAT_UNPICKLE = {"torch.load", "np.load", "numpy.load", "yaml.load"}


def violations(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            names = set()
        found += [f"line {node.lineno} imports {name}" for name in names & MODULES_THAT_RUN_DATA]  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in CALLS_THAT_RUN_DATA:
            found.append(f"line {node.lineno} calls {called.id}")
        if isinstance(called, ast.Attribute) and ast.unparse(called) in METHODS_THAT_UNPICKLE:
            found.append(f"line {node.lineno} calls {ast.unparse(called)}")
    return found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "eval('1')", "torch.load('x')", "def f():\n    exec('a = 1')"],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert len(violations(ast.parse(source))) == 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_runs_what_it_reads(path: Path) -> None:
    assert violations(ast.parse(path.read_text())) == []


@pytest.mark.parametrize("message", typing.get_args(wire.Message), ids=lambda message: message.__name__)
def test_every_field_of_every_frame_has_a_limit(message: type) -> None:
    """No field takes a megabyte, or a number of 65 bits: each is refused by its own check."""
    for field in dataclasses.fields(message):
        check = field.metadata["check"]
        for excess in (b"x" * (1 << 20), "x" * (1 << 20), 1 << 64, -1, ("x",) * (1 << 16), None, 1.5, True):
            assert not check(excess), (field.name, excess)


@pytest.mark.parametrize("config", [RouterConfig, PrefillConfig, DecodeConfig])
def test_ports_are_bound_to_loopback_unless_told_otherwise(config: type) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    assert defaults["host"] == "127.0.0.1"
    assert defaults.get("kv_host", "") == ""  # as `host`
