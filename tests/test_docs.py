"""The documents are true: the paths, links, options, metrics and tests they name exist, and none is left out."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from prometheus_client import CollectorRegistry

from decode.config import DecodeConfig
from decode.metrics import DecodeMetrics
from prefill.config import PrefillConfig
from prefill.metrics import PrefillMetrics
from router.config import RouterConfig
from router.metrics import RouterMetrics

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
OPERATIONS = (ROOT / "docs/operations.md").read_text()


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def section(text: str, title: str) -> str:
    """The body of the heading `title`, up to the next heading of any level."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"no heading {title!r}"
    return match.group(1)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", link):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_named_in_backticks_exist(page: Path) -> None:
    for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", page.read_text()):
        assert any((base / path).exists() for base in (ROOT, page.parent)), path


def test_the_tree_lists_what_is_there_and_all_of_it() -> None:
    listed = set(re.findall(r"^    (\S+)", section((ROOT / "README.md").read_text(), "The tree"), re.MULTILINE))
    for path in listed:
        assert (ROOT / path).exists(), path
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {f"{name.partition('.')[0]}/" for name in packages} | {"tests/", "docs/", "compose/", "examples/"}
    assert folders <= listed


def default_shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(
    ("process", "config"), [("router", RouterConfig), ("prefill", PrefillConfig), ("decode", DecodeConfig)]
)
def test_every_option_is_documented_with_its_default(process: str, config: Any) -> None:
    shared = ["Options of every process", *(["Options of both kinds of worker"] if process != "router" else [])]
    tables = "".join(section(OPERATIONS, title) for title in [*shared, f"Options of `python -m {process}`"])
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| ([^|]*) \|", tables, re.MULTILINE))
    fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(config)}
    assert set(rows) == set(fields)
    for name, field in fields.items():
        assert rows[name].strip("` ") == default_shown(field.default), name


@pytest.mark.parametrize(
    ("title", "figures"),
    [("Of a router", RouterMetrics), ("Of a prefill worker", PrefillMetrics), ("Of a decode worker", DecodeMetrics)],
)
def test_every_metric_is_documented_and_exists(title: str, figures: Any) -> None:
    registry = CollectorRegistry()
    figures(registry)
    exported = {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in registry.collect()}
    assert set(re.findall(r"^\| `(\w+)` ", section(OPERATIONS, title), re.MULTILINE)) == exported


def test_metrics_named_in_advice_exist() -> None:
    documented = set(re.findall(r"^\| `(twinpool_\w+)` ", OPERATIONS, re.MULTILINE))
    assert set(re.findall(r"`(twinpool_\w+)`", OPERATIONS)) == documented


def test_the_failure_table_names_tests_that_exist() -> None:
    table = section((ROOT / "docs/architecture.md").read_text(), "When something fails")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 8
    for row in rows:
        file = ""
        names = re.findall(r"`(test_\w+\.py)?::(test_\w+)`", row)
        assert names, row
        for named_file, name in names:
            file = named_file or file
            assert f"def {name}(" in (ROOT / "tests/flow" / file).read_text(), name


def test_the_picture_is_well_formed_and_described() -> None:
    svg = ElementTree.parse(ROOT / "docs/request.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert svg.tag == f"{space}svg"
    assert svg.get("viewBox")
    assert svg.findtext(f"{space}title")
    assert svg.findtext(f"{space}desc")
