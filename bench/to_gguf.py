"""Writes a GGUF file whose matrices are all of one type, so that llama.cpp serves the weights that we serve.

    python -m bench.to_gguf SOURCE.gguf TARGET.gguf BF16|Q8_0

Matrices are dequantized to bf16, which is what `twinpool convert` makes of SOURCE, and for Q8_0 quantized from there.
Of a tied model's two copies the larger serves both, as there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from engine.convert import is_same_matrix

BF16, Q8_0, F32 = GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
FILE_TYPES = {BF16: LlamaFileType.MOSTLY_BF16, Q8_0: LlamaFileType.MOSTLY_Q8_0}
_OWN_FIELDS = ("general.architecture", "general.file_type", "general.quantization_version")  # the writer's business


def rewrite(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Rows that do not divide into Q8_0's blocks stay bf16; vectors are fp32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _OWN_FIELDS:
            item = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(2)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    embedding, output = tensors["token_embd.weight"], tensors.get("output.weight")
    if output is not None and is_same_matrix(embedding, output):
        tensors["token_embd.weight"] = max(embedding, output, key=lambda tensor: tensor.n_bytes)
        del tensors["output.weight"]
    for name, tensor in tensors.items():
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(name, values, raw_dtype=F32)
            continue
        rounded = quantize(values, BF16)
        if kind == Q8_0 and values.shape[-1] % 32 == 0:
            writer.add_tensor(name, quantize(dequantize(rounded, BF16), Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, rounded, raw_dtype=BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.to_gguf", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("type", choices=[kind.name for kind in FILE_TYPES])
    args = parser.parse_args()
    rewrite(args.source, args.target, GGMLQuantizationType[args.type])


if __name__ == "__main__":
    main()
