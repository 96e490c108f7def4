"""Text of a stream against the text of the tokenizers library, which decodes all at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from router.detokenizer import Detokenizer, TokenBytes
from tests.router.conftest import byte_level_tokenizer
from twinpool.errors import ConfigError

TEXTS = st.text(
    alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab é▁€😀👩‍👩‍👧\u200d\n")), max_size=40
)


def trained_byte_level() -> Tokenizer:
    """Byte-level BPE with merges, so that tokens end inside of characters."""
    tokenizer = byte_level_tokenizer()
    corpus = ["naïve café 😀😃😄 👩‍👩‍👧 héllo wörld 日本語 日曜日 €€"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Llama 2's pipeline: "▁" for spaces, one put in front, and bytes for what the vocabulary lacks."""
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for piece in ["▁", "a", "b", "e", "l", "h", "o", "▁a", "▁b", "é", "lo", "hel"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("l", "o")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


TOKENIZERS = {
    "bytes": byte_level_tokenizer(),
    "byte-level": trained_byte_level(),
    "sentencepiece": sentencepiece_like(),
}
VOCABULARIES = {name: TokenBytes(tokenizer, 0) for name, tokenizer in TOKENIZERS.items()}


def streamed(name: str, token_ids: list[int], *, at_start: bool) -> list[str]:
    detokenizer = Detokenizer(VOCABULARIES[name], at_start=at_start)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_stream_equals_the_whole_decode(name: str, text: str) -> None:
    token_ids = TOKENIZERS[name].encode(text).ids
    pieces = streamed(name, token_ids, at_start=True)
    whole = TOKENIZERS[name].decode(token_ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)  # never half a character


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS.filter(bool), data=st.data())
@settings(max_examples=100, deadline=None)
def test_answer_goes_on_where_the_prompt_ended(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode("a" + text).ids
    cut = data.draw(st.integers(1, len(token_ids)))
    prompt = tokenizer.decode(token_ids[:cut])
    if prompt.endswith("\ufffd"):
        return  # the prompt ends inside of a character
    assert prompt + "".join(streamed(name, token_ids[cut:], at_start=False)) == tokenizer.decode(token_ids)


@given(st.lists(st.integers(0, 258), max_size=30))
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_text_become_the_same_replacement_characters(token_ids: list[int]) -> None:
    assert "".join(streamed("bytes", token_ids, at_start=True)) == TOKENIZERS["bytes"].decode(token_ids)


@given(st.lists(st.integers(0, 399), max_size=30))
@settings(max_examples=150, deadline=None)
def test_random_tokens_of_a_trained_vocabulary(token_ids: list[int]) -> None:
    token_ids = [token_id for token_id in token_ids if token_id < TOKENIZERS["byte-level"].get_vocab_size()]
    assert "".join(streamed("byte-level", token_ids, at_start=True)) == TOKENIZERS["byte-level"].decode(token_ids)


def test_emoji_appears_with_its_last_byte() -> None:
    assert streamed("bytes", list("😀!".encode()), at_start=True) == ["", "", "", "😀", "!", ""]


def test_unfinished_character_is_replaced_at_the_end_only() -> None:
    assert streamed("bytes", list("é".encode()[:1]), at_start=True) == ["", "\ufffd"]


def test_special_tokens_have_bytes_and_show_nothing() -> None:
    vocabulary = VOCABULARIES["bytes"]
    assert vocabulary.own[257] == b"<|im_start|>"
    assert streamed("bytes", [72, 257, 105], at_start=True) == ["H", "", "i", ""]


def test_ids_beyond_the_tokenizer_are_empty() -> None:
    vocabulary = TokenBytes(TOKENIZERS["bytes"], vocab_size=300)
    assert vocabulary.own[299] == vocabulary.shown[299] == b""


def test_unknown_kind_of_decoder_is_a_configuration_error() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        TokenBytes(tokenizer, 0)
