from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from tests import tiny_models
from tests.decode.pair import load_engine


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="package")
def oracle(model: Path) -> Engine:
    """An engine that nobody else uses: what it says alone is the right answer."""
    return load_engine(model)


@pytest.fixture
def engine(model: Path) -> Callable[..., Engine]:
    """engine(rows=..., kv_dtype=...) -> a fresh engine."""

    def load(**options: Any) -> Engine:
        return load_engine(model, **options)

    return load
