from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny_models


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("model") / "tiny", "llama")
