import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from service import log


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_is_one_json_object_with_who_when_and_what(capsys):
    log.setup("info", "decode", "decode-1")
    logging.getLogger("decode.worker").warning("%s lost", "a:1", extra={"attempt": 2, "reason": "gone\nfor good"})
    (line,) = lines(capsys)
    when = datetime.fromisoformat(str(line.pop("ts")))
    assert abs(datetime.now(when.tzinfo) - when) < timedelta(minutes=1)
    assert when.utcoffset() == timedelta(0)
    assert line == {
        "level": "warning",
        "process": "decode",
        "worker_id": "decode-1",
        "logger": "decode.worker",
        "event": "a:1 lost",
        "attempt": 2,
        "reason": "gone\nfor good",
    }


def test_a_request_is_one_line_with_its_fields(capsys):
    log.setup("info", "router")
    log.log_request(logging.getLogger("router"), request_id="r1", ttft_ms=41.5, finish_reasons=["stop"])
    (line,) = lines(capsys)
    assert (line["event"], line["request_id"], line["ttft_ms"]) == ("request", "r1", 41.5)
    assert line["finish_reasons"] == ["stop"]
    assert "worker_id" not in line


def test_a_field_of_megabytes_is_cut(capsys):
    log.setup("info", "router")
    logging.getLogger("x").info("y" * 1_000_000, extra={"error": "z" * 1_000_000, "short": "s"})
    (line,) = lines(capsys)
    assert str(line["event"]).endswith("yyy... (1000000 characters)")
    assert len(str(line["event"])) + len(str(line["error"])) < 10_000
    assert line["short"] == "s"


def test_a_traceback_stays_in_its_line(capsys):
    log.setup("info", "router")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = lines(capsys)
    assert "ValueError: boom" in str(line["exception"])


def test_lines_below_the_level_are_left_out(capsys):
    log.setup("warning", "router")
    logging.getLogger("x").info("nothing to see")
    assert lines(capsys) == []


def test_values_that_json_does_not_know_are_written_as_text(capsys):
    log.setup("info", "router")
    logging.getLogger("x").info("odd", extra={"ids": {7}})
    assert lines(capsys)[0]["ids"] == "{7}"
