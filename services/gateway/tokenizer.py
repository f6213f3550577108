"""Loads a model's tokenizer, special tokens and chat template, and converts between text and token ids.

The module uses only the `tokenizers` library. The library transformers would import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.services.gateway.guards.text_limit import TextLimit
from outrider.services.gateway.json_file import read_json_object
from outrider.services.gateway.templates.renderer import TemplateRenderer
from outrider.shared.base.errors import CheckpointError, InvalidRequestError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SHORT_TEXT = 4096
"""Length in characters up to which a text is encoded on the event loop.

For a text of this length or less, waking a worker thread would take longer than encoding.
"""


@dataclass(frozen=True, slots=True)
class ChatEnding:
    """How the prompt of a chat ends, and whether the tokenizer adds special tokens to the prompt.

    Attributes:
        add_generation_prompt: Whether the prompt ends with the header of the assistant's answer.
        continue_final_message: Whether the prompt ends inside the last message, which the model then
            continues.
        add_special_tokens: Whether the tokenizer adds special tokens of its own to the template's text.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


PLAIN = ChatEnding()


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Converts between text and token ids of one model, and renders the model's chat template.

    Attributes:
        tokenizer: The tokenizer, for decoding streams.
        template: Renders the model's chat template. None if the model has no template.
        limit: Refuses texts that cannot fit in the model's context.
    """

    tokenizer: Tokenizer
    template: TemplateRenderer | None
    limit: TextLimit = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", TextLimit(self.tokenizer))

    @classmethod
    def load(cls, path: Path) -> TextCodec:
        """Load the text codec from a model's folder, or from a tokenizer.json.

        Raises:
            CheckpointError: If a file is missing or broken. The error names the file and the fix.
        """
        folder = path.parent if path.is_file() else path
        file = path if path.is_file() else path / TOKENIZER_FILE
        if not file.exists():
            raise CheckpointError(
                f"{folder} has no {TOKENIZER_FILE}. Create it with `outrider convert tokenizer {folder}`, "
                "or serve token ids only (outrider up --skip-tokenizer; gateway: omit --tokenizer).",
                field=str(file),
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            # The Rust library raises a bare Exception for every kind of broken file.
            raise CheckpointError(
                f"{file} cannot be loaded by the `tokenizers` library: {error}.", field=str(file)
            ) from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = read_json_object(folder / CONFIG_FILE)
        special = _special_tokens(read_json_object(folder / SPECIAL_TOKENS_FILE)) | _special_tokens(config)
        source = _template_source(folder, config)
        return cls(tokenizer, TemplateRenderer(source, special) if source else None)

    @property
    def template_source(self) -> str:
        """The chat template's source text. Empty if the model has no template."""
        return self.template.source if self.template is not None else ""

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens of the tokenizer, with their ids."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {str(token.content): number for number, token in added.items() if token.special}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of `text`.

        Raises:
            InvalidRequestError: If the text cannot fit in the model's context.
        """
        self.limit.check(len(text))
        if len(text) <= SHORT_TEXT:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        # Only the library's batch functions release the GIL while they work. This one computes no offsets.
        return tuple(self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a piece of text. Add no special tokens."""
        return self.encode(text, add_special_tokens=False)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        ending: ChatEnding | None = None,
    ) -> tuple[int, ...]:
        """Render a chat with the model's template, and return the token ids of the resulting prompt.

        By default, the tokenizer adds no special tokens, because the template writes them.

        Args:
            messages: Messages in order, each with ``role`` and ``content``.
            options: Additional variables for the template.
            ending: How the prompt ends. With None, it ends with the header of the assistant's answer.

        Raises:
            InvalidRequestError: If the model has no chat template, or the template rejects these messages.
        """
        ending = ending or PLAIN
        text = self._need_template().submit(messages, options, ending.add_generation_prompt).result()
        return self._encode_rendered(text, messages, ending)

    async def encode_aside(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode text without blocking the event loop. A worker thread encodes long text."""
        if len(text) <= SHORT_TEXT:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat_aside(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        ending: ChatEnding | None = None,
    ) -> tuple[int, ...]:
        """Render and encode a chat without blocking the event loop.

        The arguments are the same as for `encode_chat`.

        Raises:
            InvalidRequestError: If the model has no chat template, or the template rejects these messages.
        """
        ending = ending or PLAIN
        rendered = self._need_template().submit(messages, options, ending.add_generation_prompt)
        text = await asyncio.wrap_future(rendered)
        if len(text) <= SHORT_TEXT:
            return self._encode_rendered(text, messages, ending)
        return await asyncio.to_thread(self._encode_rendered, text, messages, ending)

    def _need_template(self) -> TemplateRenderer:
        if self.template is None:
            raise InvalidRequestError(
                "This model has no chat template. Use /v1/completions, or add chat_template.jinja to the "
                "tokenizer's folder.",
                field="messages",
                reason="no_chat_template",
            )
        return self.template

    def _encode_rendered(
        self, text: str, messages: Sequence[Mapping[str, Any]], ending: ChatEnding
    ) -> tuple[int, ...]:
        if ending.continue_final_message:
            text = _cut_after(text, str(messages[-1]["content"]))
        return self.encode(text, add_special_tokens=ending.add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`."""
        if len(token_ids) <= SHORT_TEXT:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        return str(self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])


def start_templates(codecs: Iterable[TextCodec]) -> list[Future[Any]]:
    """Start to compile the chat templates. Return the futures of `TemplateRenderer.start`."""
    return [codec.template.start() for codec in codecs if codec.template is not None]


def close_templates(codecs: Iterable[TextCodec]) -> None:
    """End the processes that render chat templates."""
    for codec in codecs:
        if codec.template is not None:
            codec.template.close()


def _cut_after(text: str, content: str) -> str:
    """Return the rendered chat up to the end of the last message's content.

    The content is found even if the template has stripped the white space around it.
    """
    start = text.rfind(content.strip())
    if start < 0:
        raise InvalidRequestError(
            "continue_final_message cannot be used here, because the model's chat template changes the "
            "content of the last message.",
            field="continue_final_message",
        )
    length = len(content.lstrip()) if text.startswith(content.lstrip(), start) else len(content.strip())
    return text[: start + length]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name, such as ``bos_token``.

    A token in `config` is either a text, or an object with the text as ``content``.
    """
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    plain, wrapped = (folder / name for name in TEMPLATE_FILES)
    if plain.exists():
        return plain.read_text(encoding="utf-8")
    value = read_json_object(wrapped).get("chat_template") or config.get("chat_template")
    if isinstance(value, list):
        # A model can have several named templates. "default" is the plain template. The other templates are
        # for tools and RAG.
        value = next(
            (one.get("template") for one in value if isinstance(one, dict) and one.get("name") == "default"),
            None,
        )
    if value is not None and not isinstance(value, str):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: chat_template must be text or a list of named templates.",
            field="chat_template",
        )
    return value
