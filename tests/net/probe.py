"""python -m tests.net.probe ROUTER: a client for whoever cannot reach the router. One JSON command a line, one answer.

{"pools": true}                               states of the workers
{"metric": NAME, "at": HOST:PORT}             sum of its samples
{"prompt": [...], "max_tokens": N, ...}       {"token_ids", "timeline"} or {"error"}; with "announce": true a line
                                              "first" before it, as soon as the first token is there
"""

from __future__ import annotations

import json
import sys
import urllib.request
from dataclasses import asdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from twinpool.client import Client
from twinpool.errors import TwinpoolError


def generate(client: Client, prompt: list[int], announce: bool = False, **options: Any) -> Any:
    try:
        with client.stream(prompt, temperature=0, ignore_eos=True, **options) as stream:
            token_ids: list[int] = []
            for chunk in stream:
                if announce and not token_ids:
                    print(json.dumps("first"), flush=True)
                token_ids += chunk.token_ids
            assert stream.timeline is not None
            return {"token_ids": token_ids, "timeline": asdict(stream.timeline)}
    except TwinpoolError as error:
        return {"error": type(error).__name__, "message": error.message}


def metric(name: str, at: str) -> float:
    with urllib.request.urlopen(f"http://{at}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def main(router: str) -> None:
    with Client(router, retries=0, timeout_s=60) as client:
        for line in sys.stdin:
            command = json.loads(line)
            if "pools" in command:
                answer: Any = [worker.state for worker in client.pools().workers]
            elif "metric" in command:
                answer = metric(command["metric"], command["at"])
            else:
                answer = generate(client, **command)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
