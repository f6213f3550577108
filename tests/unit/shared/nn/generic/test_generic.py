"""Models that run through transformers equal its eager attention. Unsupported models are rejected."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.family_models import Sequences, assert_near, random_tokens
from support.models.generic_models import (
    CASES,
    LAYERS,
    REFUSED,
    WINDOW,
    WINDOWED,
    make,
    reference,
    reference_logits,
    save,
)

from outrider.services.target.app import Target
from outrider.services.target.scheduling.limits import longest_text
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.nn.config.model_config import ConfigReader
from outrider.shared.nn.decoder import EMBEDDING, LM_HEAD
from outrider.shared.nn.generic.config import parse_generic_config
from outrider.shared.nn.generic.model import GenericDecoder
from outrider.shared.nn.open import load_decoder, read_model_config

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generic")


@pytest.mark.parametrize(
    "backend", ["reference", "triton"]
)  # without a GPU, "triton" runs the kernels' references
@pytest.mark.parametrize("case", list(CASES))
def test_logits_of_chunks_and_steps_equal_transformers(case: str, backend: str, folder: Path) -> None:
    texts = [random_tokens(seed, 3 * WINDOW) for seed in (1, 2)]
    decoder = load_decoder(save(case, folder))
    assert isinstance(decoder, GenericDecoder)
    sequences = Sequences(decoder, 2, backend=backend)
    cuts = [0, 33, 60, *range(61, len(texts[0]) + 1, 3), len(texts[0])]
    parts: list[list[torch.Tensor]] = [[], []]
    for start, stop in pairwise(cuts):
        if start < stop:
            logits, _ = sequences.run([start, start], [text[start:stop] for text in texts])
            for part, rows in zip(parts, logits.split(stop - start), strict=True):
                part.append(rows)
    for text, part in zip(texts, parts, strict=True):
        assert_near(torch.cat(part), reference_logits(case, text))


@pytest.mark.parametrize("case", list(CASES))
def test_tree_rows_equal_a_pass_over_their_own_path(case: str, folder: Path) -> None:
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5], [0, 1, 6]]
    prompts = [random_tokens(3, 2 * WINDOW + 5), random_tokens(4, 1)]
    rows = [random_tokens(seed, len(paths)) for seed in (6, 7)]
    sequences = Sequences(load_decoder(save(case, folder)), 2)
    sequences.run([0, 0], prompts)
    ancestors = torch.tensor([[sum(1 << node for node in path)] for path in paths] * 2, dtype=torch.int32)
    positions = [[len(prompt) + len(path) - 1 for path in paths] for prompt in prompts]
    logits, _ = sequences.run([len(prompt) for prompt in prompts], rows, positions, ancestors)
    for prompt, tokens, found in zip(prompts, rows, logits.split(len(paths)), strict=True):
        for path in ([0, 1, 3], [0, 2, 4, 5], [0, 1, 6]):
            assert_near(
                found[path], reference_logits(case, prompt + [tokens[node] for node in path])[-len(path) :]
            )


@pytest.mark.parametrize("case", list(CASES))
def test_captured_states_are_the_outputs_of_the_named_layers(case: str, folder: Path) -> None:
    tokens, named = random_tokens(9, WINDOW + 20), (0, LAYERS - 1)
    decoder = load_decoder(save(case, folder))
    assert isinstance(decoder, GenericDecoder)
    states: list[torch.Tensor] = []
    layers = [reference(case).get_submodule(decoder.config.layout.layer_paths[index]) for index in named]  # type: ignore[attr-defined]

    def keep(_module: Any, _arguments: Any, out: Any) -> None:
        states.append(out[0] if isinstance(out, tuple) else out)

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        reference_logits(case, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    _, aux = Sequences(decoder, 1).run([0], [tokens], aux=named)
    assert aux is not None
    for part, state in zip(aux.chunk(len(named), dim=-1), states, strict=True):
        assert_near(part, state.view(len(tokens), -1), 1e-5)


@pytest.mark.parametrize("case", WINDOWED)
def test_the_window_matters(case: str, folder: Path) -> None:
    """The comparison above would fail if the window were ignored."""
    tokens = random_tokens(1, 3 * WINDOW)
    decoder = load_decoder(save(case, folder))
    assert isinstance(decoder, GenericDecoder)
    assert WINDOW in decoder.config.windows
    wide = make(CASES[case][0], CASES[case][1] | {"sliding_window": 100})
    with torch.no_grad():
        unlimited = wide(torch.tensor([tokens]), use_cache=False).logits[0]
    assert float((unlimited - reference_logits(case, tokens)).abs().max()) > 1e-2


def test_the_cap_of_scores_matters() -> None:
    """The comparison above would fail if the cap were ignored."""
    tokens = random_tokens(1, WINDOW)
    uncapped = make(CASES["gemma2"][0], CASES["gemma2"][1] | {"attn_logit_softcapping": None})
    with torch.no_grad():
        unlimited = uncapped(torch.tensor([tokens]), use_cache=False).logits[0]
    assert float((unlimited - reference_logits("gemma2", tokens)).abs().max()) > 1e-2


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_unsupported_model_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    prefix, overrides, field, message = REFUSED[name]
    make(prefix, overrides).config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(tmp_path)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"}}, "auto_map", "never run"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "quantized"),
        ({"architectures": ["PhiForSequenceClassification"]}, "architectures", "not a target model"),
        ({"hidden_size": "wide"}, "model_type", "transformers rejects this 'phi' configuration"),
        ({"num_attention_heads": 0}, "model_type", "cannot create PhiForCausalLM|rejects this 'phi'"),
        ({"model_type": "gemma3"}, "model_type", "multimodal"),
        ({"model_type": "marian", "is_encoder_decoder": True}, "model_type", "encoder-decoder"),
        ({"model_type": "no_such_model"}, "model_type", "not supported"),
    ],
)
def test_config_files_are_refused_by_key(
    change: dict[str, Any], field: str, message: str, folder: Path, tmp_path: Path
) -> None:
    raw = json.loads((save("phi", folder) / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(tmp_path)
    assert caught.value.field == field


def test_a_model_without_rms_norms_may_say_null_there(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((save("cohere2", folder) / "config.json").read_text()) | {"rms_norm_eps": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).model_type == "cohere2"


def test_any_exception_of_a_model_class_names_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clumsy(*_: object) -> None:
        raise IndexError("of a list")

    monkeypatch.setattr("outrider.shared.nn.generic.config.probe", clumsy)
    (tmp_path / "config.json").write_text((save("phi", folder) / "config.json").read_text())
    with pytest.raises(CheckpointError, match="IndexError: of a list") as caught:
        read_model_config(tmp_path)
    assert caught.value.field == str(tmp_path / "config.json")
    assert isinstance(caught.value.__cause__, IndexError)


def broken(folder: Path, path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Copy phi's checkpoint with tensors replaced, added, or left out (None)."""
    source = save("phi", folder)
    tensors: dict[str, Any] = load_file(source / "model.safetensors") | change
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        path / "model.safetensors",
        {"format": "pt"},
    )
    (path / "config.json").write_text((source / "config.json").read_text())
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.fc1.weight": None}, "1 tensor missing"),
        ({"model.layers.9.mlp.fc1.weight": torch.zeros(2)}, "1 tensor unexpected"),
        ({"model.layers.1.mlp.fc1.weight": torch.zeros(3, 2)}, "1 tensor misshaped"),
        ({"model.layers.1.mlp.fc1.weight": torch.full((96, 64), torch.nan)}, "NaN or infinite"),
        (
            {"model.layers.1.mlp.fc1.weight": torch.ones(96, 64, dtype=torch.int32)},
            "not fp32, fp16 or bf16: .*fc1.weight is int32",
        ),
        ({"model.layers.1.mlp.fc1.weight": torch.ones(96, 64, dtype=torch.int64)}, "fc1.weight is int64"),
        ({"model.layers.1.mlp.fc1.weight": torch.ones(96, 64, dtype=torch.uint8)}, "fc1.weight is uint8"),
        ({"model.layers.1.mlp.fc1.weight": torch.ones(96, 64, dtype=torch.bool)}, "fc1.weight is bool"),
        (
            {"model.layers.1.mlp.fc1.weight": torch.ones(96, 64).to(torch.float8_e4m3fn)},
            "fc1.weight is float8_e4m3fn",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_tensor(
    change: dict[str, torch.Tensor | None], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_decoder(broken(folder, tmp_path, change))
    assert caught.value.field == next(iter(change))


def test_masks_of_old_exports_are_left_in_the_file(folder: Path, tmp_path: Path) -> None:
    """A stored causal mask is not a weight: old exports of gpt-neox contain one."""
    source = save("gpt-neox", folder)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    save_file(
        load_file(source / "model.safetensors") | {"gpt_neox.layers.0.attention.bias": mask},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    assert_near(
        Sequences(load_decoder(tmp_path), 1).run([0], [[1, 2, 3]])[0], reference_logits("gpt-neox", [1, 2, 3])
    )


@pytest.mark.parametrize("left_out", ["up_proj", ""])
def test_a_missing_expert_is_named_by_its_fused_tensor(left_out: str, folder: Path, tmp_path: Path) -> None:
    source = save("olmoe", folder)
    expert = f"model.layers.1.mlp.experts.3.{left_out}"
    tensors = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if not name.startswith(expert)
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match="misshaped") as caught:
        load_decoder(tmp_path)
    assert str(caught.value.field).startswith("model.layers.1.mlp.experts.")


def test_shards_and_prefixes_of_older_exports_are_read(tmp_path: Path) -> None:
    reference("olmoe").save_pretrained(tmp_path / "olmoe", max_shard_size="50KB")
    reference("gpt2").save_pretrained(tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    for case in ("olmoe", "gpt2"):
        decoder = load_decoder(tmp_path / case)
        assert_near(Sequences(decoder, 1).run([0], [[1, 2, 3]])[0], reference_logits(case, [1, 2, 3]))


def test_truncated_files_are_refused(folder: Path, tmp_path: Path) -> None:
    broken(folder, tmp_path, {})
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_decoder(tmp_path)


def test_weights_can_be_borrowed_unless_the_head_has_a_bias(folder: Path) -> None:
    cohere, phi = (load_decoder(save(case, folder)) for case in ("cohere", "phi"))
    assert torch.equal(cohere.weight(EMBEDDING), reference("cohere").get_input_embeddings().weight)
    assert torch.equal(cohere.weight(LM_HEAD), cohere.weight(EMBEDDING))  # tied
    with pytest.raises(CheckpointError, match="has a bias"):
        phi.weight(LM_HEAD)


def test_learned_positions_end_with_their_table(folder: Path) -> None:
    """Drafts may lie beyond the last position; they must not change the rows before it."""
    decoder, size = load_decoder(save("gpt2", folder)), 128
    text, sequences = random_tokens(1, size), Sequences(decoder, 1, tokens=size + 4)
    sequences.run([0], [text[:-1]])
    logits, _ = sequences.run([size - 1], [[text[-1], 5, 6]])
    assert_near(logits[:1], reference_logits("gpt2", text)[-1:])


def test_no_text_is_longer_than_a_table_of_positions(folder: Path) -> None:
    table, rotated = (read_model_config(save(case, folder)) for case in ("gpt2", "phi"))
    assert (table.max_positions, rotated.max_positions) == (128, None)
    assert longest_text(table, None) == longest_text(table, 128) == 128
    assert longest_text(table, 40) == 40
    assert longest_text(rotated, None) == 128
    assert longest_text(rotated, 300) == 300
    with pytest.raises(
        ConfigurationError, match=r"learned positions for only 128 tokens.*--max-model-len 128 or less"
    ) as caught:
        longest_text(table, 129)
    assert caught.value.field == "max_model_len"


def test_a_target_is_not_started_beyond_the_table(folder: Path) -> None:
    options = {"model": save("gpt2", folder), "device": "cpu", "threads": 1, "kv_tokens": 512}
    with pytest.raises(ConfigurationError, match="--max-model-len 4096"):
        Target(TargetSettings.load(options | {"max_model_len": 4096}))
    target = Target(TargetSettings.load(options))
    try:
        assert target.engine.limits.max_model_len == 128
    finally:
        target.shutdown()


def test_sinks_and_windows_of_a_model_of_transformers_are_honoured(tmp_path: Path) -> None:
    model = make(
        "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": WINDOW}
    )
    model.save_pretrained(tmp_path)
    tokens = random_tokens(1, 2 * WINDOW)
    with torch.no_grad():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0]
    path = tmp_path / "config.json"
    config = parse_generic_config(ConfigReader(json.loads(path.read_text()), path), ())
    decoder = GenericDecoder.open(tmp_path, config, torch.device("cpu"), torch.float32)
    assert_near(Sequences(decoder, 1).run([0], [tokens])[0], want)


def test_a_missing_transformers_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.shared.nn.generic.choose.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="needs transformers: pip install"):
        read_model_config(save("phi", folder))


def test_different_weights_have_different_fingerprints(folder: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    again.mkdir()
    other.mkdir()
    first = load_decoder(save("phi", folder)).fingerprint
    assert load_decoder(broken(folder, again, {})).fingerprint == first
    assert (
        load_decoder(broken(folder, other, {"model.layers.1.mlp.fc1.weight": torch.ones(96, 64)})).fingerprint
        != first
    )
