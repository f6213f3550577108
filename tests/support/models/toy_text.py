"""Writes a tokenizer folder: byte-level BPE from a few sentences, special tokens and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, USER, ASSISTANT, SYSTEM = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = (
    "List 3 countries and their capitals. France: Paris. Japan: Tokyo. Peru: Lima.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "What is the capital of France? The capital of France is Paris.",
)


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `folder`.

    Ids 0 to 4 are the special tokens, and EOS is 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"content": EOS}} | (
        {"chat_template": template} if template else {}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
