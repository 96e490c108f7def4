"""twinpool generate: one prompt, one answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from twinpool.commands.connection import add_router_option, connect
from twinpool.commands.request_flags import add_request_flags, request_options
from twinpool.errors import InvalidRequest
from twinpool.options import conversation
from twinpool.results import Generation


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="one prompt, one answer",
        description="Answers a prompt, given as the argument or on stdin. The text is streamed to stdout.",
    )
    parser.add_argument("prompt", nargs="?", help="text [default: read from stdin]")
    add_router_option(parser)
    parser.add_argument("--chat", action="store_true", help="render the prompt as a user's message first")
    parser.add_argument("--json", action="store_true", help="print one JSON object: text, token ids, usage, timeline")
    parser.add_argument("--n", type=int, default=argparse.SUPPRESS, help="answers to the prompt, 1 to 16 [default 1]")
    parser.add_argument(
        "--logprobs", type=int, default=argparse.SUPPRESS, help="0 to 20: alternatives shown beside each token (--json)"
    )
    parser.add_argument("--echo", action="store_true", default=argparse.SUPPRESS, help="begin with the prompt")
    add_request_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.prompt)
    prompt = conversation(text) if args.chat else text
    options = request_options(args)
    with connect(args) as client:
        if args.json:
            print(json.dumps(_as_json(client.generate(prompt, **options)), ensure_ascii=False))
        elif options.get("n", 1) != 1:  # streamed, they would be interleaved
            for choice in client.generate(prompt, **options).choices:
                print(f"--- {choice.index + 1} ---\n{choice.text}")
        else:
            with client.stream(prompt, **options) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
            print()
    return 0


def read_text(argument: str | None) -> str:
    """The argument, else all of stdin. Raises InvalidRequest when there is neither, or it is not UTF-8."""
    if argument is not None:
        return argument
    if sys.stdin.isatty():
        raise InvalidRequest("no prompt: give it as an argument or pipe it in", field="prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"stdin is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}", field="prompt"
        ) from error


def _as_json(answer: Generation) -> dict[str, Any]:
    """All of the answer; a token's bytes as text, with U+FFFD where they are part of a character."""

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode("utf-8", errors="replace")
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value

    return {"text": answer.text, **plain(dataclasses.asdict(answer))}
