"""Damaged checkpoints: the loader and `outrider doctor` refuse each and name the key or file at fault."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.damaged_files import (
    WEIGHTS_FILE,
    edit_config,
    edit_header,
    edit_tensors,
    overlap,
    pickle_code,
    put,
    set_tokenizer,
    truncate,
)
from support.models.toys import make_toy_eagle3, make_toy_target
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.draft.heads.registry import load_head
from outrider.services.draft.strategies.tokenizer_check import check_same_tokenizer
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.open import load_decoder

torch.set_num_threads(1)
RUNNER = CliRunner()
LAYER = "model.layers.1.mlp.down_proj.weight"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_toy_target(folder / "target", vocab_size=40, hidden_size=32)
    make_toy_eagle3(folder / "head", folder / "target", draft_vocab_size=24)
    return folder


@pytest.fixture
def pair(originals: Path, tmp_path: Path) -> Path:
    shutil.copytree(originals, tmp_path / "pair")
    return tmp_path / "pair"


def doctor(pair: Path, *more: str) -> tuple[int, dict[str, Any]]:
    result = RUNNER.invoke(
        cli.app,
        [
            "doctor",
            "--target",
            str(pair / "target"),
            "--draft",
            str(pair / "head"),
            "--device",
            "cpu",
            "--json",
            *more,
        ],
    )
    assert result.stdout, result.exception
    return result.exit_code, json.loads(result.stdout)


TARGET_FAULTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "truncated": (truncate, "", "truncated or corrupt"),
    "no safetensors at all": (
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"\0" * 64),
        "",
        "truncated or corrupt",
    ),
    "empty": (
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(b""),
        "",
        "too short for a safetensors header",
    ),
    "header that is not JSON": (
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 4) + b"{{{{" + b"\0" * 8),
        "",
        "header that is not JSON",
    ),
    "header with a huge number": (
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 5000) + b"1" * 5000),
        *("", "header that is not JSON"),
    ),
    "dtype that is a list": (
        lambda folder: edit_header(folder, lambda header: header[LAYER].update(dtype=["F32"])),
        LAYER,
        "not supported",
    ),
    "overlapping offsets": (
        lambda folder: edit_header(folder, overlap),
        "model.",
        "overlaps the tensor before it",
    ),
    "offsets beyond the file": (
        lambda folder: edit_header(folder, lambda header: header[LAYER].update(data_offsets=[0, 1 << 40])),
        LAYER,
        "truncated or corrupt",
    ),
    "wrong dtype": (
        lambda folder: edit_tensors(
            folder, lambda tensors: tensors.update({LAYER: tensors[LAYER].to(torch.int32)})
        ),
        LAYER,
        "not fp32, fp16 or bf16",
    ),
    "NaN weight": (
        lambda folder: edit_tensors(folder, lambda tensors: put(tensors, LAYER, float("nan"))),
        LAYER,
        "NaN or infinite",
    ),
    "infinite weight": (
        lambda folder: edit_tensors(folder, lambda tensors: put(tensors, LAYER, float("-inf"))),
        LAYER,
        "NaN or infinite",
    ),
    "missing tensor": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(LAYER)),
        LAYER,
        "1 tensor missing",
    ),
    "unexpected tensor": (
        lambda folder: edit_tensors(
            folder, lambda tensors: tensors.update({"model.layers.9.extra": torch.ones(2)})
        ),
        "model.layers.9.extra",
        "1 tensor unexpected",
    ),
    "misshaped tensor": (
        lambda folder: edit_config(folder, intermediate_size=64),
        "model.layers.0.mlp.gate_proj.weight",
        "misshaped",
    ),
    "unknown architecture": (
        lambda folder: edit_config(folder, model_type="martian", architectures=["MartianLM"]),
        "model_type",
        "martian",
    ),
    "code in the folder": (
        lambda folder: edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
        "auto_map",
        "never",
    ),
    "a value of an unexpected type": (
        lambda folder: edit_config(folder, partial_rotary_factor="half"),
        "config.json",
        "could not convert",
    ),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json", "does not exist"),
    "configuration that is not JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json",
        "cannot be read as JSON",
    ),
}

HEAD_FAULTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "truncated": (truncate, "", "truncated or corrupt"),
    "overlapping offsets": (lambda folder: edit_header(folder, overlap), "", "overlaps the tensor before it"),
    "wrong dtype": (
        lambda folder: edit_tensors(
            folder, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.int8)})
        ),
        "fc.weight",
        "not fp32, fp16 or bf16",
    ),
    "NaN weight": (
        lambda folder: edit_tensors(
            folder, lambda tensors: put(tensors, "midlayer.mlp.up_proj.weight", float("nan"))
        ),
        "midlayer.mlp.up_proj.weight",
        "NaN or infinite",
    ),
    "missing tensor": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop("midlayer.hidden_norm.weight")),
        "midlayer.hidden_norm.weight",
        "1 tensor missing",
    ),
    "d2t of target ids": (
        lambda folder: edit_tensors(
            folder, lambda tensors: tensors.update(d2t=tensors["d2t"] + torch.arange(24))
        ),
        "d2t",
        "offsets",
    ),
    "d2t of floats": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors.update(d2t=tensors["d2t"].float())),
        "d2t",
        "integers",
    ),
    "unknown architecture": (
        lambda folder: edit_config(folder, architectures=["MartianHead"]),
        "architectures",
        "MartianHead",
    ),
    "code in the folder": (
        lambda folder: edit_config(folder, auto_map={"AutoModel": "modeling_x.X"}),
        "auto_map",
        "never",
    ),
    "an architecture that is not a string": (
        lambda folder: edit_config(folder, architectures={"a": 1}),
        "architectures",
        "list of strings",
    ),
    "a value of an unexpected type": (
        lambda folder: edit_config(folder, partial_rotary_factor="half"),
        "config.json",
        "could not convert",
    ),
    "pickle that runs code": (
        pickle_code,
        "",
        "without running code",
    ),
}


@pytest.mark.parametrize("fault", list(TARGET_FAULTS))
def test_a_bad_target_is_refused_by_name(pair: Path, fault: str) -> None:
    spoil, field, words = TARGET_FAULTS[fault]
    spoil(pair / "target")
    with pytest.raises(CheckpointError) as caught:
        load_decoder(pair / "target", "cpu", torch.float32)
    assert words in caught.value.message
    assert field in (caught.value.field or "")
    check_report(pair, field, words)


@pytest.mark.parametrize("fault", list(HEAD_FAULTS))
def test_a_bad_head_is_refused_by_name(pair: Path, fault: str) -> None:
    spoil, field, words = HEAD_FAULTS[fault]
    spoil(pair / "head")
    with pytest.raises(CheckpointError) as caught:
        load_head(pair / "head", CPU, torch.float32)
    assert words in caught.value.message
    assert field in (caught.value.field or "")
    check_report(pair, field, words)


def check_report(pair: Path, field: str, words: str) -> None:
    """Check that the doctor refuses the pair too, and that one finding has both the field and the words."""
    code, report = doctor(pair)
    assert code == 2
    assert report["verdict"] == "refused"
    refused = [finding for finding in report["findings"] if finding["severity"] == "refused"]
    assert any(
        field in finding["field"] and words in finding["message"] + finding["fix"] for finding in refused
    ), refused
    assert all(finding["fix"] or len(finding["message"]) > 40 for finding in refused), "each names a fix"


def test_the_undamaged_pair_is_not_refused(pair: Path) -> None:
    code, report = doctor(pair)
    assert code == 0
    assert not [finding for finding in report["findings"] if finding["severity"] == "refused"]


def test_numbers_beyond_the_dtype_are_distinguished_from_damage(pair: Path) -> None:
    edit_tensors(pair / "target", lambda tensors: put(tensors, LAYER, 1e30))
    assert load_decoder(pair / "target", "cpu", torch.float32).dtype is torch.float32
    with pytest.raises(CheckpointError, match="beyond float16; serve with --dtype") as caught:
        load_decoder(pair / "target", "cpu", torch.float16)
    assert caught.value.field == LAYER


def test_the_damaged_part_of_a_fused_projection_is_named(pair: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    edit_tensors(pair / "target", lambda tensors: put(tensors, name, float("inf")))
    with pytest.raises(CheckpointError) as caught:
        load_decoder(pair / "target", "cpu", torch.float32)
    assert caught.value.field == name
    assert "q_proj" not in caught.value.message


def test_integers_and_empty_tensors_are_not_checked_for_nan(tmp_path: Path) -> None:
    save_file({"d2t": torch.arange(4), "none.weight": torch.zeros(0, 3)}, tmp_path / WEIGHTS_FILE)
    with CheckpointReader(tmp_path) as reader:
        assert reader.take("d2t", (4,), dtype=torch.int64).tolist() == [0, 1, 2, 3]
        assert reader.take("none.weight", (0, 3)).shape == (0, 3)


def test_tokenizers_that_differ_are_refused_and_the_first_token_named(pair: Path) -> None:
    set_tokenizer(pair / "target", {"a": 0, "b": 1, "c": 2})
    set_tokenizer(pair / "head", {"a": 0, "c": 1, "b": 2})
    code, report = doctor(pair)
    assert code == 2
    (finding,) = [finding for finding in report["findings"] if finding["severity"] == "refused"]
    assert finding["field"] == "tokenizer.json"
    assert "2 tokens differ" in finding["message"]
    assert "'b' is id 1 and id 2" in finding["message"]


def test_a_tokenizer_that_exceeds_the_vocabulary_is_only_warned_about(pair: Path) -> None:
    """The text-only Gemma 3 is published like this: its tokenizer has an image token without an embedding."""
    set_tokenizer(pair / "target", {"a": 0, "<image>": 40})
    code, report = doctor(pair)
    assert code == 0
    (finding,) = [finding for finding in report["findings"] if "ids up to 40" in finding["message"]]
    assert finding["severity"] == "warning"
    assert "'<image>'" in finding["message"]


@pytest.mark.parametrize(
    "raw",
    [
        {"model": [1]},
        {"model": {"vocab": {"a": "x"}}},
        {"model": {"vocab": [1, 2]}},
        {"model": {}, "added_tokens": [{"id": 1}]},
    ],
    ids=["model is a list", "id is a text", "pieces are numbers", "added token without content"],
)
def test_a_tokenizer_whose_tokens_cannot_be_read_is_refused_by_its_name(
    pair: Path, raw: dict[str, Any]
) -> None:
    file = pair / "head" / "tokenizer.json"
    set_tokenizer(pair / "target", {"a": 0})
    file.write_text(json.dumps({"model": {"vocab": {"a": 0}}} | raw))
    code, report = doctor(pair)
    assert code == 2
    assert [finding["field"] for finding in report["findings"] if finding["severity"] == "refused"] == [
        str(file)
    ]
    with pytest.raises(CheckpointError) as caught:
        check_same_tokenizer(pair / "head", pair / "target")
    assert caught.value.field == str(file)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "head_dim", "intermediate_size", "num_attention_heads"]
)
def test_a_size_above_the_limit_is_refused_by_its_key(pair: Path, key: str) -> None:
    file = pair / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: 10**30}))
    code, report = doctor(pair)
    assert code == 2
    assert key in [finding["field"] for finding in report["findings"] if finding["severity"] == "refused"]


def test_an_invalid_context_length_of_a_head_is_ignored(pair: Path) -> None:
    file = pair / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": "long"}))
    assert doctor(pair)[0] == 0, "serving does not read this key"


def test_the_services_refuse_at_start_with_exit_code_2(pair: Path) -> None:
    edit_tensors(pair / "target", lambda tensors: put(tensors, LAYER, float("nan")))
    edit_tensors(pair / "head", lambda tensors: put(tensors, "norm.weight", float("nan")))
    for arguments, field in (
        (
            [
                "serve",
                "target",
                "--model",
                str(pair / "target"),
                "--device",
                "cpu",
                "--listen",
                f"unix:{pair}/t",
            ],
            LAYER,
        ),
        (
            [
                "serve",
                "draft",
                "--draft",
                str(pair / "head"),
                "--device",
                "cpu",
                "--listen",
                f"unix:{pair}/d",
            ],
            "norm.weight",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "outrider.services.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert f"{field} contains NaN or infinite numbers" in done.stderr
        assert "Traceback" not in done.stderr
