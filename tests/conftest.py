"""Fixtures that several folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twinpool import model_store


@pytest.fixture(scope="session", autouse=True)
def packed_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Workers of the tests share packed weights with each other, and leave none behind."""
    os.environ.setdefault("TWINPOOL_PACKED_WEIGHTS", str(tmp_path_factory.mktemp("packed")))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The embedded default model, fetched once into the model store; TWINPOOL_TEST_MODEL names another to check."""
    return model_store.ensure(os.environ.get("TWINPOOL_TEST_MODEL") or model_store.DEFAULT_MODEL)
