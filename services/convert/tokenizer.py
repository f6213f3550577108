"""Makes a tokenizer.json from a slow tokenizer's files; the only place in the serving tree where transformers is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import CheckpointError, ConfigurationError

TOKENIZER_FILE = "tokenizer.json"
SAMPLES: Sequence[str] = (
    "Hello, world!",
    "  two  spaces,\ttabs\nand lines\n\n",
    "def f(x):\n    return x ** 2  # 3.14159",
    "naïve café – Zürich “quoted” …",
    "Привет, мир. 你好,世界。 こんにちは 안녕하세요 مرحبا",
    "🙂👩‍👩‍👧 1234567890 a_b-c@d.e",
)


@dataclass(frozen=True, slots=True)
class ConvertedTokenizer:
    """What was written: the file, its size, the class that it came from, and how many sample texts were compared."""

    file: Path
    tokens: int
    kind: str
    compared: int


def convert_tokenizer(folder: Path, output: Path | None = None) -> ConvertedTokenizer:
    """Convert a folder's tokenizer and compare both on sample texts.

    Args:
        folder: With the slow tokenizer's files (vocab.json and merges.txt, tokenizer.model, vocab.txt …).
        output: File to write; ``tokenizer.json`` in the folder if None.

    Raises:
        ConfigurationError: transformers is not installed, or the file exists.
        CheckpointError: transformers cannot read or convert it, or the result encodes differently.
    """
    file = output or folder / TOKENIZER_FILE
    if file.exists():
        raise ConfigurationError(
            f"{file} exists already; remove it, or name another by --output.", field=str(file)
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist; give a model folder.", field=str(folder))
    try:
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"Converting needs transformers: pip install 'outrider[train]' ({error}).", field="transformers"
        ) from None
    try:
        original: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        backend = original.backend_tokenizer
    except Exception as error:
        # transformers raises whatever its many tokenizers raise; the text says which file or package is missing.
        raise CheckpointError(
            f"{folder}: transformers cannot convert this tokenizer: {error}", field=str(folder)
        ) from error
    backend.save(str(file))
    written = Tokenizer.from_file(str(file))
    for text in SAMPLES:
        if written.encode(text).ids != list(original(text)["input_ids"]):
            file.unlink()
            raise CheckpointError(
                f"{folder}: the converted tokenizer encodes {text!r} differently; it was not kept.",
                field=TOKENIZER_FILE,
            )
    return ConvertedTokenizer(file, written.get_vocab_size(), type(original).__name__, len(SAMPLES))
