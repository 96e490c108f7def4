"""Turns a GGUF file into a Hugging Face directory, once: dequantized to bf16, with tokenizer and chat template.

    python -m engine.convert SOURCE.gguf DIRECTORY      (what `twinpool convert` runs)

The directory appears whole or not at all. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file

from engine.gguf_tokenizer import GgufTokenizer
from engine.rope import Rotary, parse_rope
from twinpool.errors import ConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SHARD_BYTES = 4 << 30
ROWS_AT_ONCE = 4096  # bounds the fp32 copy while a big matrix is dequantized

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(src: Path, dst: Path, progress: Callable[[int, int], None] = lambda done_bytes, total: None) -> None:
    """Writes the directory `dst` from the file `src`; `progress(done, total)` counts bytes of the file's tensors.

    Raises ConfigError when `src` is no GGUF file of a supported model or `dst` exists with something in it.
    """
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise ConfigError(f"{dst} exists already: remove it or name another directory")
    source = _Source.open(src)
    partial = dst.with_name(f".{dst.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        source.write(partial, progress)
        partial.rename(dst)
    except OSError as exc:
        raise ConfigError(f"cannot write {dst}: {exc}") from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Source:
    """An open GGUF file of a supported architecture."""

    architecture: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]
    tokenizer: GgufTokenizer

    @classmethod
    def open(cls, path: Path) -> _Source:
        try:
            reader = GGUFReader(path)
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError) as exc:
            raise ConfigError(f"{path} is no readable GGUF file: {exc or type(exc).__name__}; fetch it again") from exc
        architecture = fields.get("general.architecture")
        if architecture not in ARCHITECTURES or fields.get(f"{architecture}.expert_count", 0):
            raise ConfigError(
                f"{path} holds a model of architecture {architecture!r}"
                f"{' with experts' if architecture in ARCHITECTURES else ''}; supported are dense "
                f"{', '.join(ARCHITECTURES)}"
            )
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        if "token_embd.weight" not in tensors:
            raise ConfigError(f"{path} holds no token_embd.weight: it is no whole model")
        return cls(architecture, fields, tensors, GgufTokenizer(fields))

    def write(self, directory: Path, progress: Callable[[int, int], None]) -> None:
        names, is_tied = self._target_names()
        config = self._config(is_tied)
        self.tokenizer.build().save(str(directory / "tokenizer.json"))
        _write_json(directory / "tokenizer_config.json", self.tokenizer.settings(config["max_position_embeddings"]))
        _write_json(directory / "config.json", config)
        tokens = {"bos_token_id": self.tokenizer.bos_token_id, "eos_token_id": self.tokenizer.end_token_ids}
        _write_json(directory / "generation_config.json", tokens)
        self._write_weights(directory, names, progress)

    def _target_names(self) -> tuple[dict[str, str], bool]:
        """GGUF name -> Hugging Face name of every tensor to write, and whether the output matrix is the embedding.

        Files of tied models may hold the matrix twice, quantized in different ways: then the finer copy serves both.
        """
        names = {name: _target_name(name) for name in self.tensors if name != "rope_freqs.weight"}
        embedding, output = self.tensors["token_embd.weight"], self.tensors.get("output.weight")
        if output is None:
            return names, True
        if not is_same_matrix(embedding, output):
            return names, False
        finer, other = sorted((embedding, output), key=lambda t: t.n_bytes, reverse=True)
        del names[other.name]
        names[finer.name] = "model.embed_tokens.weight"
        return names, True

    def _get(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks the field {self.architecture}.{name}")
        return value

    @property
    def _head_dim(self) -> int:
        return self._get("attention.key_length", self._get("embedding_length") // self._get("attention.head_count"))

    def _config(self, is_tied: bool) -> dict[str, Any]:
        heads = self._get("attention.head_count")
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "hidden_size": self._get("embedding_length"),
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": self._head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": _decimal(self._get("attention.layer_norm_rms_epsilon")),
            "rope_theta": _decimal(self._get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": is_tied,
            "torch_dtype": "bfloat16",
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.end_token_ids,
        }
        if self.architecture != "qwen2" and "blk.0.attn_q.bias" in self.tensors:
            config["attention_bias"] = True
        rope_scaling = self._rope_scaling(config)
        return config if rope_scaling is None else config | {"rope_scaling": rope_scaling}

    def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self.tensors:
            return self._llama3_scaling(config)
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": _decimal(self._get("rope.scaling.factor"))}
        original = self._get("rope.scaling.original_context_length", 0)
        return scaling | ({"original_max_position_embeddings": original} if original else {})

    def _llama3_scaling(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """GGUF stores Llama 3's scaling as every frequency's divisor; the released models differ in `factor` only."""
        divisors = torch.from_numpy(np.array(self.tensors["rope_freqs.weight"].data, dtype=np.float32))
        scaling = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        scaled = parse_rope({**config, "rope_scaling": scaling}, config["rope_theta"], 8192)
        plain = parse_rope(config, config["rope_theta"], 8192)
        expected = Rotary(plain, self._head_dim).inv_freq / Rotary(scaled, self._head_dim).inv_freq
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
            raise ConfigError(
                "the GGUF file's rope_freqs are not Llama 3's: use the model's Hugging Face directory instead"
            )
        return scaling

    def _write_weights(self, directory: Path, names: Mapping[str, str], progress: Callable[[int, int], None]) -> None:
        shards = self._shards(names)
        total = sum(int(self.tensors[name].n_bytes) for name in names)
        done, weight_map = 0, {}
        progress(done, total)
        for number, shard in enumerate(shards, 1):
            tensors = {}
            for name in shard:
                tensors[names[name]] = self._dequantize(name)
                done += int(self.tensors[name].n_bytes)
                progress(done, total)
            file_name = (
                "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            )
            save_file(tensors, directory / file_name, metadata={"format": "pt"})
            (directory / file_name).chmod(0o644)  # safetensors leaves it to the owner alone
            weight_map.update(dict.fromkeys(tensors, file_name))
        if len(shards) > 1:
            _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})

    def _shards(self, names: Mapping[str, str]) -> list[list[str]]:
        shards: list[list[str]] = [[]]
        filled = 0
        for name in names:
            num_bytes = 2 * int(self.tensors[name].n_elements)
            if shards[-1] and filled + num_bytes > SHARD_BYTES:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += num_bytes
        return shards

    def _dequantize(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        result = torch.empty(shape, dtype=torch.bfloat16)
        step = ROWS_AT_ONCE if len(shape) > 1 else len(tensor.data)
        for begin in range(0, len(tensor.data), step):
            values = dequantize(tensor.data[begin : begin + step], tensor.tensor_type)
            result[begin : begin + step] = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
        if self.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            result = _pairs_to_halves(result, self._head_dim)
        return result


def _pairs_to_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """GGUF orders llama's query and key rows for rope over neighbours, Hugging Face over rows i and i + D/2."""
    heads = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape).contiguous()


def _target_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{suffix}"
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if not stem.startswith("blk.") or rest not in _LAYER_NAMES:
        raise ConfigError(f"the GGUF file holds a tensor {name!r} that no supported model has")
    return f"model.layers.{block}.{_LAYER_NAMES[rest]}.{suffix}"


def is_same_matrix(a: ReaderTensor, b: ReaderTensor, num_rows: int = 256) -> bool:
    """Whether two tensors are one matrix quantized twice, by the direction of some of their rows."""
    if tuple(a.shape) != tuple(b.shape):
        return False
    stride = max(1, len(a.data) // num_rows)
    x, y = (dequantize(t.data[::stride].copy(), t.tensor_type).astype(np.float64).ravel() for t in (a, b))
    return float(x @ y) > 0.9 * float(np.linalg.norm(x) * np.linalg.norm(y))


def _decimal(value: float) -> float:
    """The decimal that an fp32 stands for: 1e-05, not 9.99999974e-06."""
    return float(f"{value:.7g}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="twinpool convert", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="the GGUF file")
    parser.add_argument("directory", type=Path, help="the Hugging Face directory to write; must not exist")
    args = parser.parse_args(argv)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns) as bar:
            task = bar.add_task(f"converting {args.source.name}", total=None)
            convert_gguf(args.source, args.directory, lambda done, total: bar.update(task, completed=done, total=total))
    except ConfigError as exc:
        print(f"twinpool convert: {exc.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
