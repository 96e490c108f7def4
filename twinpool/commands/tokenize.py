"""twinpool tokenize: the token ids of a text, or with --decode the text of token ids."""

from __future__ import annotations

import argparse
from typing import Any

from twinpool.commands.connection import add_router_option, connect
from twinpool.commands.generate import read_text
from twinpool.errors import InvalidRequest
from twinpool.options import conversation


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tokenize", help="text to token ids and back", description="Token ids of a text, separated by spaces."
    )
    parser.add_argument("text", nargs="?", help="text, or ids with --decode [default: read from stdin]")
    add_router_option(parser)
    parser.add_argument("--chat", action="store_true", help="render the text as a user's message first")
    parser.add_argument("--decode", action="store_true", help="from ids to text")
    parser.add_argument("--model", default="", help="a name from `twinpool models` [default: the only one]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text)
    with connect(args, timeout_s=30) as client:
        if args.decode:
            try:
                token_ids = [int(word) for word in text.replace(",", " ").split()]
            except ValueError as error:
                raise InvalidRequest(f"token ids are whole numbers: {error}", field="token_ids") from error
            print(client.detokenize(token_ids, model=args.model, special_tokens=True))
        else:
            prompt = conversation(text) if args.chat else text
            print(*client.tokenize(prompt, model=args.model))
    return 0
