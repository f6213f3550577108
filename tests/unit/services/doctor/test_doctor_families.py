"""The doctor on all target families, quantised files and MTP layers: verdicts and sizes as in serving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import generic_models
from support.models.family_models import CASES, pack_mxfp4, save, store_fp8
from support.models.toy_mtp import Model
from support.models.toy_mtp import save as save_mtp

from outrider.services.doctor.examine import examine
from outrider.services.doctor.finding import DoctorReport, Severity
from outrider.services.doctor.generic_tensors import model_of, saved_shapes
from outrider.services.doctor.memory import estimate_memory
from outrider.services.doctor.pair import Pair
from outrider.services.doctor.probe import judge_probe, run_probe
from outrider.services.draft.build import build_engine
from outrider.services.draft.settings import DraftSettings
from outrider.shared.base.errors import OutriderError
from outrider.shared.kv.pool import token_bytes
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.tree import DraftShape

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def pair_of(target: Path, draft: Path | None = None, algorithm: Algorithm = Algorithm.AUTO) -> Pair:
    return Pair(target, draft, algorithm, CPU, torch.float32)


def refused(report: DoctorReport) -> list[str]:
    return [finding.message for finding in report.findings if finding.severity is Severity.REFUSED]


def assert_right(target: Path) -> None:
    """Check that the doctor accepts a target, and that its sizes match the loaded weights and cache.

    Norms and routers are not counted exactly, but they are small.
    """
    pair = pair_of(target)
    assert refused(examine(pair)) == []
    plan, decoder = estimate_memory(pair), load_decoder(target, "cpu", torch.float32)
    # The decoder counts a tied embedding twice.
    tied = decoder.lm_head.nbytes if decoder.config.tie_word_embeddings else 0
    held = decoder.weight_bytes - tied
    assert held <= plan.target_weights <= 1.06 * held
    pool = decoder.make_pool(2, 16)
    assert plan.target_kv_per_token == pool.bytes_per_token


@pytest.mark.parametrize("case", list(CASES))
def test_every_family_is_known_and_measured(folder: Path, case: str) -> None:
    assert_right(save(case, folder))


def test_mxfp4_weights_are_counted_as_they_are_widened(folder: Path, tmp_path: Path) -> None:
    pack_mxfp4(tmp_path / "packed", save("gpt-oss", folder))
    assert_right(tmp_path / "packed")


def test_fp8_weights_are_counted_as_they_are_widened(folder: Path, tmp_path: Path) -> None:
    store_fp8(tmp_path / "fp8", save("deepseek-v3", folder), (16, 16))
    pair = pair_of(tmp_path / "fp8")
    assert refused(examine(pair)) == []
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    tiny = {
        name: torch.full_like(tensor, 3e-4) if name.endswith("_scale_inv") else tensor
        for name, tensor in tensors.items()
    }
    save_file(tiny, tmp_path / "fp8" / "model.safetensors")
    assert not any("never filled" in finding.message for finding in examine(pair).findings)
    scale = next(name for name in tiny if name.endswith("_scale_inv"))
    save_file(tiny | {scale: torch.zeros_like(tiny[scale])}, tmp_path / "fp8" / "model.safetensors")
    assert [one.field for one in examine(pair).findings if "never filled" in one.message] == [scale]
    plain = estimate_memory(pair_of(save("deepseek-v3", folder))).target_weights
    assert plain <= estimate_memory(pair).target_weights <= 1.02 * plain, "the scales are small"


def test_mtp_layers_are_examined_measured_and_probed(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = save_mtp(Model(4, 2), tmp_path / "target")
    pair = pair_of(target, algorithm=Algorithm.MTP)
    report = examine(pair)
    assert refused(report) == []
    assert any("2 MTP layers" in finding.message for finding in report.findings)
    plan, config = estimate_memory(pair), pair.target_config
    with CheckpointReader(target) as reader:
        own = sum(info.nbytes for name, info in reader.tensors.items() if "mtp_layers" in name)
    assert plan.draft_weights == own
    assert plan.draft_kv_per_token == token_bytes(2, config.num_kv_heads, config.head_dim, torch.float32)
    (measured,) = run_probe(pair, [(1, 2, 3)], 8, DraftShape(2, 1, 3))
    assert measured.tokens == 8


def test_the_probe_names_mtp_layers_of_another_model_of_the_same_size(tmp_path: Path) -> None:
    folders = []
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            folders.append(save_mtp(Model(2, 1), tmp_path / str(seed)))
    pair = pair_of(folders[0], folders[1], Algorithm.MTP)
    assert refused(examine(pair)) == [], "all sizes are equal"
    measured = run_probe(pair, [(1, 2, 3), (7, 8)], 24, DraftShape(2, 1, 3))
    (finding,) = judge_probe(measured)
    assert finding.severity is Severity.WARNING
    assert "made for another model" in (finding.fix or "")


def test_one_nan_in_an_mtp_layer_is_found(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = save_mtp(Model(4, 2), tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    name = "model.mtp_layers.1.mlp.gate_proj.weight"
    tensors[name][3, 3] = float("nan")
    save_file(tensors, target / "model.safetensors")
    pair = pair_of(target, algorithm=Algorithm.MTP)
    (finding,) = [finding for finding in examine(pair).findings if finding.severity is Severity.REFUSED]
    assert finding.field == name
    assert name in start_error(pair)


def test_a_model_without_mtp_layers_is_refused_for_mtp(folder: Path) -> None:
    report = examine(pair_of(save("llama", folder), algorithm=Algorithm.MTP))
    assert any("contains no MTP layers" in message for message in refused(report))


def padded(folder: Path, vocab_size: int) -> Path:
    """Save a llama whose embedding tables have padding rows after the last token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(vocab_size)
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=vocab_size, **sizes)
        ).save_pretrained(folder)
    return folder


def set_tokens(folder: Path, first: int = 0) -> None:
    vocabulary = {f"t{(index + first) % 90}": index for index in range(90)}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": []})
    )


def start_error(pair: Pair) -> str:
    """Return the error message of starting a draft for the pair; empty if it starts."""
    values = {
        "draft": pair.draft,
        "target_weights": pair.target,
        "speculative_algorithm": pair.algorithm,
        "speculative_token_map": pair.token_map,
        "device": "cpu",
        "kv_tokens": 4096,
    }
    try:
        build_engine(DraftSettings.load(values), CPU, torch.float32)
    except OutriderError as error:
        return error.message
    return ""


def test_a_draft_model_whose_padding_differs_is_refused_only_without_its_tokenizer(tmp_path: Path) -> None:
    pair = pair_of(padded(tmp_path / "target", 104), padded(tmp_path / "draft", 97), Algorithm.STANDALONE)
    assert refused(examine(pair)) == [start_error(pair)], (
        "without tokenizers, padding cannot be distinguished from tokens"
    )
    for folder in (pair.target, tmp_path / "draft"):
        set_tokens(folder)
    same = pair_of(pair.target, pair.draft, Algorithm.STANDALONE)
    assert (refused(examine(same)), start_error(same)) == ([], "")
    set_tokens(tmp_path / "draft", first=1)
    other = pair_of(pair.target, pair.draft, Algorithm.STANDALONE)
    assert start_error(other) in refused(examine(other))


@pytest.mark.parametrize("algorithm", [Algorithm.STANDALONE, Algorithm.MTP, Algorithm.NGRAM])
@pytest.mark.parametrize("content", ["[1, 2, 500]", "[1, -1]", "", "[3, 1, 2]"])
def test_a_token_map_is_refused_as_by_serving_with_any_algorithm(
    algorithm: Algorithm, content: str, tmp_path: Path
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = save_mtp(Model(4, 2), tmp_path / "target")
    draft = target if algorithm is Algorithm.STANDALONE else None
    file = tmp_path / "map.json"
    if content:
        file.write_text(content)
    pair = Pair(target, draft, algorithm, CPU, torch.float32, file)
    wanted = start_error(pair)
    assert bool(wanted) == (content != "[3, 1, 2]" or algorithm is Algorithm.NGRAM)
    report = examine(pair)
    assert refused(report) == ([wanted] if wanted else [])
    assert wanted or any(
        "3 of" in finding.message for finding in report.findings if finding.field == "speculative_token_map"
    )


def test_a_token_map_without_a_draft_is_refused(folder: Path, tmp_path: Path) -> None:
    (message,) = refused(
        examine(Pair(save("llama", folder), None, Algorithm.AUTO, CPU, torch.float32, tmp_path / "map.json"))
    )
    assert "there is no draft" in message


@pytest.mark.parametrize("case", ["olmoe", "granite-moe", "glm4-moe", "qwen2-moe", "gemma2", "gpt2"])
def test_what_transformers_saves_is_known_tensor_by_tensor(folder: Path, case: str) -> None:
    """Includes experts, which transformers stacks per layer and files store one by one."""
    path = generic_models.save(case, folder)
    stored = load_file(path / "model.safetensors")
    assert dict(saved_shapes(model_of(path), path)) == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert refused(examine(pair_of(path))) == []


@pytest.mark.parametrize("case", ["olmoe", "gemma2"])
def test_a_tensor_of_a_type_that_no_weight_has_is_refused(case: str, folder: Path, tmp_path: Path) -> None:
    path = generic_models.save(case, folder)
    stored = load_file(path / "model.safetensors")
    name = next(name for name in stored if name.endswith("down_proj.weight"))
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        save_file(stored | {name: stored[name].to(dtype)}, tmp_path / "model.safetensors")
        (finding,) = [one for one in examine(pair_of(tmp_path)).findings if one.severity is Severity.REFUSED]
        assert finding.field == name
        assert f"not fp32, fp16 or bf16: {str(dtype).removeprefix('torch.')}" in finding.message


def test_a_type_that_loading_refuses_is_refused(folder: Path, tmp_path: Path) -> None:
    """FP8 without scales is refused in a natively supported family."""
    path = save("llama", folder)
    stored = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file(stored | {name: stored[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert any(f"{name} is float8_e4m3fn" in message for message in refused(examine(pair_of(tmp_path))))


@pytest.mark.parametrize("case", ["olmoe", "gemma2"])
def test_a_damaged_file_of_such_a_model_is_refused_by_the_tensor(
    case: str, folder: Path, tmp_path: Path
) -> None:
    path = generic_models.save(case, folder)
    stored = load_file(path / "model.safetensors")
    name = next(name for name in stored if name.endswith("down_proj.weight"))
    changes = {
        "missing": {},
        "the wrong shape": {name: stored[name][:-1].contiguous()},
        "renamed": {f"older.{name}": stored[name]},
    }
    for kind, change in changes.items():
        copy = tmp_path / kind
        copy.mkdir()
        (copy / "config.json").write_text((path / "config.json").read_text())
        save_file(
            {key: tensor for key, tensor in stored.items() if key != name} | change,
            copy / "model.safetensors",
        )
        report = examine(pair_of(copy))
        (finding,) = [one for one in report.findings if one.field == name]
        assert finding.severity is (Severity.WARNING if kind == "renamed" else Severity.REFUSED)
        assert "unexpected" in finding.message if kind == "renamed" else kind in finding.message
