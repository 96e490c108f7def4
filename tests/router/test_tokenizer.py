"""Prompts as the model's own files define them; what transformers makes of the same files is the right answer."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from router import chat_template
from router.chat_template import ChatTemplate
from router.tokenizer import MOST_CHARS, ModelCard, Tokenizer
from twinpool.errors import ConfigError, InvalidRequest

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où est la gare? <b>&</b> {{ 7 }}"},
]
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
        "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "blocks": (
        "{%- for message in messages %}\n    {%- if message.role == 'system' %}\n{{ message.content | trim }}\n    "
        "{%- else %}\n        {% continue %}\n    {%- endif %}\n{%- endfor %}\n{{ messages | tojson }}{{ eos_token }}"
    ),
    "tools": "{% if tools %}tools{% else %}none{% endif %}{{ messages[-1]['content'] | upper }}{{ bos_token }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_chat_equals_transformers(tmp_path: Path, model_dir: Path, name: str) -> None:
    shutil.copytree(model_dir, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATES[name])
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(special))
    oracle = PreTrainedTokenizerFast(
        tokenizer_file=str(model_dir / "tokenizer.json"), chat_template=TEMPLATES[name], **special
    )
    template = chat_template.load(tmp_path / "m")
    assert template is not None
    assert template.render(CHAT) == oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = oracle.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert await Tokenizer(tmp_path / "m", 264).encode_chat(CHAT) == ids


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[99].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
    ],
)
def test_template_that_refuses_or_oversteps_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(CHAT)
    assert caught.value.field == "chat"


def test_broken_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("{% if %}", {})


async def test_chat_without_a_template_says_what_to_send(tmp_path: Path, model_dir: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(model_dir / name, tmp_path / name)
    with pytest.raises(InvalidRequest, match="no chat template"):
        await Tokenizer(tmp_path, 264).encode_chat(CHAT)


async def test_long_text_gives_the_same_tokens(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir, 264)
    text = "añb " * 3000
    assert await tokenizer.encode(text) == list(text.encode())
    assert await tokenizer.decode(list(text.encode())) == text


async def test_text_that_cannot_fit_is_not_encoded_at_all(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir, 264)
    longest = max(map(len, tokenizer.tokens.own))
    assert len(await tokenizer.encode("a" * 10 * longest, max_tokens=10)) == 10 * longest  # counted, not guessed
    with pytest.raises(InvalidRequest, match=f"prompt has {10 * longest + 1} characters.*10 tokens") as caught:
        await tokenizer.encode("a" * (10 * longest + 1), max_tokens=10)
    assert caught.value.field == "prompt"


async def test_text_that_would_keep_a_thread_for_minutes_is_not_encoded(model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"input has {MOST_CHARS + 1} characters.*in parts"):
        await Tokenizer(model_dir, 264).encode("a" * (MOST_CHARS + 1))


async def test_encoding_a_long_text_leaves_the_event_loop_running(model_dir: Path) -> None:
    encoding = asyncio.ensure_future(Tokenizer(model_dir, 264).encode("añb " * 100_000))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await encoding) == 500_000
    assert turns > 5


async def test_ids_out_of_the_vocabulary_are_refused(model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="0 to 263") as caught:
        await Tokenizer(model_dir, 264).decode([1, 264])
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("config.json", None),
        ("config.json", "{}"),
        ("config.json", "["),
        ("config.json", "[" * 100_000),
        ("config.json", '{"max_position_embeddings": 9, "vocab_size": -5, "model_type": "x"}'),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'),
        ("tokenizer_config.json", '{"bos_token": {"a": 1}}'),
        ("tokenizer_config.json", '{"eos_token": 5}'),
    ],
)
def test_broken_model_directory_is_named(tmp_path: Path, model_dir: Path, name: str, content: str | None) -> None:
    shutil.copytree(model_dir, tmp_path / "m")
    if content is None:
        (tmp_path / "m" / name).unlink()
    else:
        (tmp_path / "m" / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        read_model(tmp_path / "m")


def read_model(folder: Path) -> tuple[ModelCard, Tokenizer]:
    return ModelCard.load("m", folder), Tokenizer(folder, 264)
