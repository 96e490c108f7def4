"""twinpool convert: a GGUF file into a Hugging Face directory, or what a model's cache takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from twinpool import model_store
from twinpool.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="a GGUF file into a Hugging Face directory; --describe: what a model needs",
        description="Writes a GGUF file as a Hugging Face directory: bf16 safetensors, tokenizer, chat template. "
        "With --describe: prints a model's parameters and cache sizes, from its config.json alone.",
    )
    parser.add_argument("source", type=Path, help="the .gguf file; with --describe a model directory or config.json")
    parser.add_argument("directory", type=Path, nargs="?", help="the directory to write; it must not exist")
    parser.add_argument("--describe", action="store_true", help="print what the model needs, convert nothing")
    parser.add_argument("--context", type=int, default=131072, help="with --describe: tokens of a sequence")
    parser.add_argument("--memory", type=float, default=64.0, help="with --describe: GiB of cache")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.describe:
        print(model_store.describe(args.source, args.context, args.memory), end="")
        return 0
    if args.directory is None:
        raise ConfigError("twinpool convert needs the directory to write, or --describe", field="directory")
    model_store.convert(args.source, args.directory)
    print(f"wrote {args.directory}")
    return 0
