"""Makes tokenizer.json from a slow tokenizer's files, and checks that it encodes like the slow tokenizer.

The check encodes sample texts with both tokenizers. This module needs the package transformers. The services
do not need this package for their tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.obs.progress import Waiting

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
    """Summary of a conversion.

    Attributes:
        file: The written file.
        tokens: Size of the vocabulary.
        kind: Class of the original tokenizer.
        compared: Number of sample texts on which the two tokenizers were compared.
    """

    file: Path
    tokens: int
    kind: str
    compared: int


def rewrite_tokenizer(folder: Path, output: Path | None = None) -> ConvertedTokenizer:
    """Convert a folder's tokenizer, and compare the result with the original on sample texts.

    Args:
        folder: Folder with the slow tokenizer's files, such as tokenizer.model, or vocab.json and merges.txt.
        output: File to write. None writes ``tokenizer.json`` into the folder.

    Raises:
        ConfigurationError: transformers is not installed, or the file exists.
        CheckpointError: transformers cannot read or convert the tokenizer, or the result encodes differently.
    """
    file = output or folder / TOKENIZER_FILE
    if file.exists():
        raise ConfigurationError(
            f"{file} already exists. Remove it, or choose another file with --output.", field=str(file)
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist. Give a model folder.", field=str(folder))
    try:
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"Converting a tokenizer needs transformers ({error}). Run: pip install 'outrider[train]'.",
            field="transformers",
        ) from None
    try:
        with Waiting("converting the tokenizer"):
            original: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            backend = original.backend_tokenizer
    except Exception as error:
        # Each tokenizer class raises its own exceptions. The exception's text names the missing file or
        # package.
        raise CheckpointError(
            f"{folder}: transformers cannot convert this tokenizer: {error}", field=str(folder)
        ) from error
    backend.save(str(file))
    written = Tokenizer.from_file(str(file))
    for text in SAMPLES:
        if written.encode(text).ids != list(original(text)["input_ids"]):
            file.unlink()
            raise CheckpointError(
                f"{folder}: the converted tokenizer encodes {text!r} differently, so it was removed.",
                field=TOKENIZER_FILE,
            )
    return ConvertedTokenizer(file, written.get_vocab_size(), type(original).__name__, len(SAMPLES))
