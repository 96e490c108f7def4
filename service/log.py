"""Logs: one JSON object a line on stderr, through the standard library's logging.

    log.setup("info", "decode", worker_id="decode-10.0.0.7:7072")
    logger = logging.getLogger(__name__)
    logger.warning("router lost", extra={"router": "10.0.0.1:7070", "reason": "UNAVAILABLE"})
    log.log_request(logger, request_id="r1", finish_reason="stop", ttft_ms=41.7)

Each line has ts (UTC), level, process, worker_id (if any), logger, event (the message) and the fields of `extra`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

# What a LogRecord carries by itself; everything else in it came with `extra`.
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_LONGEST_FIELD = 4096  # characters


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; `identity` (process, worker_id) is in every line."""

    def __init__(self, identity: dict[str, str]) -> None:
        super().__init__()
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._identity,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}
        line = {key: _cut(value) if isinstance(value, str) else value for key, value in line.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _cut(text: str) -> str:
    """What clients sent may be in it (an error names the value that is wrong), and that may be megabytes."""
    return text if len(text) <= _LONGEST_FIELD else f"{text[:_LONGEST_FIELD]}... ({len(text)} characters)"


def setup(level: str, process: str, worker_id: str = "") -> None:
    """Sends every logger of this process to stderr from `level` on ("debug", "info", "warning", "error")."""
    identity = {"process": process} | ({"worker_id": worker_id} if worker_id else {})
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(identity))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def log_request(logger: logging.Logger, **fields: Any) -> None:
    """The one line about a request that has ended: its ids, classes, counts, timeline and how it ended."""
    logger.info("request", extra=fields)
