"""What tests of kernels share. `pytestmark = pytest.mark.usefixtures("isa")` runs a file on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.ops import cpu, native
from tests.engine.isas import ISAS


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.select_isa(request.param)
    yield request.param
    native.select_isa(ISAS[-1])
    cpu.set_num_threads(1)
