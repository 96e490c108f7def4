"""twinpool convert: a GGUF file into a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from twinpool import model_store


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="a GGUF file into a Hugging Face directory",
        description="Writes a GGUF file as a Hugging Face directory: bf16 safetensors, tokenizer, chat template.",
    )
    parser.add_argument("source", type=Path, help="the .gguf file")
    parser.add_argument("directory", type=Path, help="the directory to write; it must not exist")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    model_store.convert(args.source, args.directory)
    print(f"wrote {args.directory}")
    return 0
