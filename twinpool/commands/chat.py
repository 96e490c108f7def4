"""twinpool chat: a conversation, streamed. Lines of a pipe work like lines typed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from twinpool.client import Client
from twinpool.commands.connection import add_router_option, connect
from twinpool.commands.request_flags import add_request_flags, request_options
from twinpool.errors import InvalidRequest, TwinpoolError
from twinpool.options import Message, RequestOptions

HELP = "/clear forgets the conversation, /exit (or Ctrl-D) ends it; Ctrl-C stops an answer"
CALMER = RequestOptions(temperature=0.6, top_p=0.9)  # than the API's defaults, at which small models ramble


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to the model",
        description=f"A conversation with the model. {HELP}. Lines piped in are answered one after another. "
        f"Unless told otherwise it samples at temperature {CALMER['temperature']} and top_p {CALMER['top_p']}.",
    )
    add_router_option(parser)
    parser.add_argument("--system", default="", help="a system message to begin with")
    add_request_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    interactive = sys.stdin.isatty()
    with connect(args) as client:
        if interactive:
            names = ", ".join(model.name for model in client.models())
            print(f"{names}: {HELP}.")
        talk(client, {**CALMER, **request_options(args)}, args.system, interactive)
    return 0


def talk(client: Client, options: RequestOptions, system: str, interactive: bool) -> None:
    """Answers lines until there are no more. Interactive, a failed answer is reported and the talk goes on."""
    beginning = [Message(role="system", content=system)] if system else []
    history = list(beginning)
    for line in _lines(interactive):
        if line == "/exit":
            return
        if line == "/clear":
            history = list(beginning)
        elif line.startswith("/"):
            print(f"there is no {line.split()[0]}: {HELP}", file=sys.stderr)
        elif line:
            question = Message(role="user", content=line)
            try:
                answer = _answer(client, [*history, question], options, interactive)
            except TwinpoolError as error:
                if not interactive:
                    raise
                print(f"\ntwinpool: {error.message}", file=sys.stderr)
            else:
                history += [question, Message(role="assistant", content=answer)]


def _answer(client: Client, messages: list[Message], options: RequestOptions, interactive: bool) -> str:
    """Prints the answer as it comes; the text of it. Ctrl-C keeps what has come so far."""
    text = ""
    with client.stream_chat(messages, **options) as stream:
        try:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                text += chunk.text
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(" [stopped]", end="")
    print(flush=True)
    return text


def _lines(interactive: bool) -> Iterator[str]:
    if interactive:
        import readline  # noqa: F401  (line editing and history for input())

        while True:
            try:
                yield input("> ").strip()
            except EOFError:
                print()
                return
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        try:
            yield raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"line {number} of stdin is not UTF-8 text", field="messages") from error
