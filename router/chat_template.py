"""A model's own chat template: Jinja2 from a model directory, which is untrusted input, hence the sandbox.

The environment is the one that transformers renders templates with (utils/chat_template_utils.py), so that the same
messages give the same text: whitespace control, loop controls, `tojson` without escapes, `raise_exception`,
`strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinpool.errors import ConfigError, InvalidRequest

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """Renders messages to the text that the model was trained to answer."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError when `source` is not a valid template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is broken: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt, ending where the assistant's answer begins. Raises InvalidRequest when the template refuses."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(f"chat: the model's template refuses these messages: {error}", field="chat") from error


def load(model_dir: Path) -> ChatTemplate | None:
    """The template of a model directory (chat_template.jinja, or in tokenizer_config.json); None when it has none.

    Raises ConfigError when a file is broken.
    """
    path, own_file = model_dir / "tokenizer_config.json", model_dir / "chat_template.jinja"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        source = own_file.read_text(encoding="utf-8") if own_file.exists() else config.get("chat_template")
        if isinstance(source, list):  # named templates
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        special_tokens = _special_tokens(config)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{own_file} cannot be read: {error}") from error
    except (AttributeError, TypeError, LookupError) as error:
        raise ConfigError(f"{path} is broken: {error!r}") from error
    if not isinstance(source, str | None) or not all(isinstance(token, str) for token in special_tokens.values()):
        raise ConfigError(f"{path} is broken: chat_template and the special tokens must be text")
    return ChatTemplate(source, special_tokens) if source else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that templates name; a file has them as text or as an AddedToken's fields."""
    tokens = {name: config.get(name) for name in _SPECIAL}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token}


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
