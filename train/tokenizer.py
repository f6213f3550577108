"""The demo models' tokenizer: byte-level BPE with a ChatML-like template, saved in Hugging Face layout.

Byte-level BPE can encode any text, so there is no unknown token.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.train.corpus.conversations import QuestionAnswer

BOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BOS_ID, START_ID, END_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|im_start|>system\nThese tools can be called:\n"
    "{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}"
    "To call a tool, answer with:\n<tool_call>\n"
    '{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{{ call['function'] | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The model was not trained on tools, but tool calls in the format of Hermes can be forced."""


def segments(system: str | None, messages: Iterable[QuestionAnswer]) -> list[tuple[str, bool]]:
    """Render a conversation as the chat template does.

    Returns:
        Parts of the text, each with True if the model learns to predict the part.
    """
    parts = [BOS]
    out: list[tuple[str, bool]] = []
    if system is not None:
        parts.append(f"{START}system\n{system}{END}\n")
    for m in messages:
        parts.append(f"{START}user\n")
        if m.predict_question:
            parts.append(m.question)
        else:
            out += [("".join(parts), True), (m.question, False)]
            parts = []
        parts.append(f"{END}\n{START}assistant\n{m.answer}{END}\n")
    return [*out, ("".join(parts), True)]


def render_prompt(prompt: str, system: str | None = None) -> str:
    """Render a first user message and the generation prompt as the chat template does."""
    return segments(system, [])[0][0] + f"{START}user\n{prompt}{END}\n{START}assistant\n"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. Digits stay single tokens.

    The vocabulary has exactly ``vocab_size`` entries if the text is rich enough.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": END, "pad_token": BOS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        **names,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")
