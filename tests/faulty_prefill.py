"""python -m tests.faulty_prefill: a prefill worker on whose links things go wrong, as the environment's KV_FAULTS says.

KV_FAULTS is tests.fakes.Faults as JSON; everything else is `python -m prefill`.
"""

from __future__ import annotations

import json
import os

from prefill.__main__ import main
from service.config import run_main
from tests.fakes import Faults, injected

if __name__ == "__main__":
    with injected(Faults(**json.loads(os.environ["KV_FAULTS"]))):
        run_main(main, "prefill")
