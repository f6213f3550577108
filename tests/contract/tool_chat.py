"""A gateway whose chat template shows tools, and scripts that make the target answer with a given text."""

from __future__ import annotations

from pathlib import Path

from fake_target import EOS_ID, FakeTarget, Script
from support.models.toy_text import make_tokenizer
from tokenizers import Tokenizer

HERMES = (
    "{{ bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{# </think> #}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = 'Let me see. <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TWO_CALLS = CALL + '<tool_call>{"name": "get_weather", "arguments": {"city": "Lima"}}</tool_call>'


def make_tool_tokenizer(folder: Path) -> Path:
    """Write a tokenizer folder whose template is that of a model with Hermes calls and reasoning."""
    return make_tokenizer(folder, HERMES)


def prompt_of(fake: FakeTarget, tokenizer: Tokenizer) -> str:
    """Return the text of the prompt that the target received last."""
    return str(tokenizer.decode(list(fake.seen[-1].prompt_ids), skip_special_tokens=False))


def answer_with(fake: FakeTarget, tokenizer: Tokenizer, text: str, step: int = 3) -> None:
    """Make the target answer every request with `text`, in steps of a few tokens."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS_ID]
    steps = [tokens[at : at + step] for at in range(0, len(tokens), step)]
    fake.script = lambda request: Script(steps)
