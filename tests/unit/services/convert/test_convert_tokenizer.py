"""`outrider convert tokenizer`: ids are preserved, and errors name the folder that cannot be converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.shared.base.errors import CheckpointError, ConfigurationError, OutriderError

RUNNER = CliRunner()


def make_slow_tokenizer(folder: Path) -> Path:
    """Save the files of a GPT-2 tokenizer with all bytes and a few merges."""
    # Fails early if transformers drops this class.
    from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer  # noqa: F401

    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in visible] + [chr(256 + index) for index in range(256 - len(visible))]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    vocabulary = [*letters, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


def convert_tokenizer(folder: Path, *more: str) -> str:
    result = RUNNER.invoke(cli.app, ["convert", "tokenizer", str(folder), *more])
    if isinstance(result.exception, OutriderError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_slow_tokenizer_becomes_a_file_that_the_gateway_reads(tmp_path: Path) -> None:
    from outrider.services.gateway.tokenizer import TextCodec

    folder = make_slow_tokenizer(tmp_path / "model")
    with pytest.raises(CheckpointError, match="outrider convert tokenizer"):
        TextCodec.load(folder)
    assert "262 tokens" in convert_tokenizer(folder)
    codec = TextCodec.load(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    assert codec.encode("hello w") == (vocabulary["hello"], vocabulary["Ġw"])


def test_tokenizers_that_cannot_be_converted_are_named(tmp_path: Path) -> None:
    folder = make_slow_tokenizer(tmp_path / "model")
    output = tmp_path / "out.json"
    convert_tokenizer(folder, "--output", str(output))
    assert output.is_file()
    with pytest.raises(ConfigurationError, match="already exists"):
        convert_tokenizer(folder, "--output", str(output))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="cannot convert"):
        convert_tokenizer(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="does not exist"):
        convert_tokenizer(tmp_path / "nowhere")
