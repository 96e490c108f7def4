"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json.

Byte-level BPE only ("gpt2" in GGUF's terms). What cuts text into words before BPE is named by `tokenizer.ggml.pre`;
the splits below are those of the published tokenizer.json of the models that the names stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from twinpool.errors import ConfigError

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _WORDS.format(digits=r"\p{N}")
_LLAMA3_WORDS = _WORDS.format(digits=r"\p{N}{1,3}")


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A view of the `tokenizer.*` fields of a GGUF file."""

    fields: Mapping[str, Any]

    def __post_init__(self) -> None:
        kind = self._get("model")
        if kind != "gpt2":
            raise ConfigError(
                f"the GGUF file's tokenizer is of kind {kind!r}, only byte-level BPE ('gpt2') can be converted: "
                "use the model's Hugging Face directory instead"
            )

    @property
    def bos_token_id(self) -> int | None:
        return self._get("bos_token_id")

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end an answer: the file's own, and control tokens known for it (Qwen, Llama 3 have several)."""
        ids = [self._get("eos_token_id"), self._get("eot_token_id")]
        ids += [i for i, token in enumerate(self._get("tokens")) if self._type(i) == CONTROL and token in END_TOKENS]
        return list(dict.fromkeys(i for i in ids if i is not None))

    def build(self) -> Tokenizer:
        """Raises ConfigError for a way of splitting words that is not known here."""
        pre = self._get("pre", "gpt-2")
        vocab = {token: i for i, token in enumerate(self._get("tokens")) if self._type(i) != UNUSED}
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in self._get("merges"))]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _pre_tokenizer(pre)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = self._post_processor(pre)
        tokenizer.add_tokens(
            [AddedToken(t, normalized=False) for t, i in vocab.items() if self._type(i) == USER_DEFINED]
        )
        tokenizer.add_special_tokens(
            [AddedToken(t, normalized=False, special=True) for t, i in vocab.items() if self._type(i) == CONTROL]
        )
        return tokenizer

    def settings(self, max_context: int) -> dict[str, Any]:
        """The content of tokenizer_config.json."""
        named = {
            "bos_token": self._token("bos_token_id"),
            "eos_token": self._token("eos_token_id"),
            "unk_token": self._token("unknown_token_id"),
            "pad_token": self._token("padding_token_id"),
            "chat_template": self.fields.get("tokenizer.chat_template"),
        }
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_context,
            "clean_up_tokenization_spaces": False,
        } | {key: value for key, value in named.items() if value is not None}

    def _post_processor(self, pre: str) -> Any:
        byte_level = processors.ByteLevel(trim_offsets=False)
        bos = self._token("bos_token_id")
        if bos is None or not self._get("add_bos_token", pre == "llama-bpe"):
            return byte_level
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, self.bos_token_id)]
        )
        return processors.Sequence([byte_level, template])

    def _get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(f"tokenizer.ggml.{name}", default)

    def _type(self, token_id: int) -> int:
        types = self._get("token_type")
        return 1 if types is None else types[token_id]

    def _token(self, id_name: str) -> str | None:
        token_id = self._get(id_name)
        return None if token_id is None else self._get("tokens")[token_id]


def _pre_tokenizer(pre: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("gpt-2", "default"):
        return gpt2_words
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_words])
    if pre in ("qwen2", "llama-bpe"):
        words = _QWEN2_WORDS if pre == "qwen2" else _LLAMA3_WORDS
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])
    raise ConfigError(
        f"the GGUF file's tokenizer splits words by the rules of {pre!r}; known are smollm, qwen2, llama-bpe and "
        "gpt-2: use the model's Hugging Face directory instead"
    )
