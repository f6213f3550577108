"""EAGLE-3 checkpoints: every dialect loads as the same head, and unfit tensors are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.draft_reference import PlainEagle3
from support.models.head_dialects import run
from support.models.toys import make_toy_eagle3, make_toy_target, read_target_tensor

from outrider.services.draft.build import borrow, build_engine
from outrider.services.draft.heads.eagle3 import EMBEDDING, LM_HEAD, Eagle3Head
from outrider.services.draft.heads.registry import load_head
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.base.errors import CheckpointError

VOCAB, HIDDEN, DRAFT_VOCAB = 40, 32, 24
CPU = torch.device("cpu")
TARGET = TargetInfo("t", "f", VOCAB, HIDDEN, 8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, hidden_size=HIDDEN)


@pytest.fixture
def head_dir(tmp_path: Path, target: Path) -> Path:
    return make_toy_eagle3(tmp_path / "head", target, draft_vocab_size=DRAFT_VOCAB)


def load(path: Path, target: Path | None = None) -> Eagle3Head:
    head = load_head(path, CPU, torch.float32)
    assert isinstance(head, Eagle3Head)
    if target is not None:
        for name in list(head.missing()):
            head.lend(name, read_target_tensor(target, name))
    return head


def outputs(head: Eagle3Head, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the head over a fixed causal sequence, and return its states and logits."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (rows,), generator=generator)
    features = torch.randn(rows, HIDDEN, generator=generator)
    return run(head, tokens, features)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    tensors = change({name: tensor.clone() for name, tensor in load_file(str(file)).items()})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(file))


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def test_the_forward_pass_equals_an_independent_one(head_dir: Path, target: Path) -> None:
    states, logits = outputs(load(head_dir, target))
    plain = PlainEagle3(head_dir, read_target_tensor(target, EMBEDDING), torch.float64)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (7,), generator=generator).tolist()
    features = torch.randn(7, HIDDEN, generator=generator).double()
    for last in range(7):
        state = plain.last_state([(tokens[t], features[t], t) for t in range(last + 1)])
        torch.testing.assert_close(states[last].double(), state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            torch.log_softmax(logits[last].double(), 0), plain.logprobs(state), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_layer_names_of_every_dialect_give_the_same_head(head_dir: Path, target: Path, prefix: str) -> None:
    expected = outputs(load(head_dir, target))[1]
    rewrite(
        head_dir,
        lambda tensors: {name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()},
    )
    assert torch.equal(outputs(load(head_dir, target))[1], expected)


def test_a_model_prefix_and_rotary_buffers_do_no_harm(head_dir: Path, target: Path) -> None:
    expected = outputs(load(head_dir, target))[1]
    buffer = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(
        head_dir,
        lambda tensors: {
            f"model.{name}" if name != "d2t" else name: tensor for name, tensor in (tensors | buffer).items()
        },
    )
    assert torch.equal(outputs(load(head_dir, target))[1], expected)


def test_configurations_of_every_dialect_give_the_same_head(head_dir: Path, target: Path) -> None:
    expected = outputs(load(head_dir, target))[1]
    raw = json.loads((head_dir / "config.json").read_text())
    aux = raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    flat = {key: value for key, value in raw.items() if key != "eagle_config"}
    own = ("architectures", "draft_vocab_size")
    speculators = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": aux,
        "transformer_layer_config": {key: value for key, value in flat.items() if key not in own},
    }
    official = {**flat, "architectures": ["LlamaForCausalLM"]}
    specforge = {
        **flat,
        "architectures": ["Eagle3LlamaForCausalLM"],
        "eagle_aux_hidden_state_layer_ids": aux,
        "num_aux_hidden_states": 3,
    }
    for dialect in (speculators, official, specforge):
        (head_dir / "config.json").write_text(json.dumps(dialect))
        head = load(head_dir, target)
        assert torch.equal(outputs(head)[1], expected)
        assert head.feature_spec(TARGET).aux_layer_ids == (1, 3, 4)


@pytest.mark.parametrize("theta", [None, 10000.0])
def test_a_head_without_rope_theta_means_ten_thousand(
    head_dir: Path, target: Path, theta: float | None
) -> None:
    expected = outputs(load(head_dir, target))[1]
    configure(head_dir, rope_theta=theta)
    assert torch.equal(outputs(load(head_dir, target))[1], expected)
    configure(head_dir, rope_theta=500000.0)
    assert not torch.allclose(outputs(load(head_dir, target))[1], expected)
    configure(head_dir, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert not torch.allclose(outputs(load(head_dir, target))[1], expected)


def test_pickled_weights_load_without_running_code(head_dir: Path, target: Path) -> None:
    expected = outputs(load(head_dir, target))[1]
    torch.save(load_file(str(head_dir / "model.safetensors")), head_dir / "pytorch_model.bin")
    (head_dir / "model.safetensors").unlink()
    assert torch.equal(outputs(load(head_dir, target))[1], expected)


def test_an_own_embedding_is_used_and_nothing_is_borrowed(
    tmp_path: Path, target: Path, head_dir: Path
) -> None:
    own = make_toy_eagle3(tmp_path / "own", target, draft_vocab_size=DRAFT_VOCAB, own_embedding=True)
    head = load(own)
    assert not head.missing()
    assert torch.equal(outputs(head)[1], outputs(load(head_dir, target))[1])


def test_a_full_lm_head_is_gathered_to_the_draft_vocabulary(head_dir: Path, target: Path) -> None:
    expected = outputs(load(head_dir, target))[1]

    def widen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        full = torch.randn(VOCAB, HIDDEN)
        full[torch.arange(DRAFT_VOCAB) + tensors["d2t"]] = tensors["lm_head.weight"]
        return tensors | {"lm_head.weight": full}

    rewrite(head_dir, widen)
    assert torch.equal(outputs(load(head_dir, target))[1], expected)


def test_an_absent_lm_head_is_borrowed_from_the_target(tmp_path: Path, target: Path) -> None:
    head = load(make_toy_eagle3(tmp_path / "head", target, lm_head="absent"))
    assert head.missing() == {EMBEDDING: (VOCAB, HIDDEN), LM_HEAD: (VOCAB, HIDDEN)}
    assert head.vocabulary.d2t is None
    for name in head.missing():
        head.lend(name, read_target_tensor(target, name))
    assert outputs(head)[1].shape == (7, VOCAB)
    with pytest.raises(CheckpointError, match="does not borrow"):
        head.lend(LM_HEAD, torch.zeros(VOCAB, HIDDEN))


def test_a_tied_target_lends_its_embedding_as_lm_head(tmp_path: Path) -> None:
    tied = make_toy_target(
        tmp_path / "target", vocab_size=VOCAB, hidden_size=HIDDEN, tie_word_embeddings=True
    )
    folder = make_toy_eagle3(tmp_path / "head", tied, lm_head="absent")
    settings = DraftSettings.load(
        {"draft": folder, "target_weights": tied, "device": "cpu", "kv_tokens": 1024}
    )
    assert not build_engine(settings, CPU, torch.float32).strategy.missing()


def test_the_projector_carries_its_norms(head_dir: Path, target: Path) -> None:
    norms = {f"fc_norm.{index}.weight": torch.full((HIDDEN,), index + 1.0) for index in range(3)}
    legacy = dict(
        zip(
            ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"),
            norms.values(),
            strict=True,
        )
    )
    original = load_file(str(head_dir / "model.safetensors"))
    fingerprints = set()
    for extra in ({}, norms, legacy, {"input_norm.weight": torch.ones(3 * HIDDEN)}):
        rewrite(head_dir, lambda _, extra=extra: original | extra)  # type: ignore[misc]
        spec = load(head_dir, target).feature_spec(TARGET)
        fingerprints.add(spec.fingerprint)
        assert spec.feature_size == HIDDEN
        assert torch.equal(spec.projector["fc.weight"], original["fc.weight"])
        if extra is norms or extra is legacy:
            assert torch.equal(spec.projector["fc_norm.2.weight"], norms["fc_norm.2.weight"])
    assert len(fingerprints) == 3


def test_norm_output_feeds_the_normed_state_back(head_dir: Path, target: Path) -> None:
    states, logits = outputs(load(head_dir, target))
    configure(head_dir, norm_output=True)
    normed_states, same_logits = outputs(load(head_dir, target))
    torch.testing.assert_close(same_logits, logits)
    assert not torch.allclose(states, normed_states)


def test_norm_before_residual_changes_the_residual(head_dir: Path, target: Path) -> None:
    states, _ = outputs(load(head_dir, target))
    configure(head_dir, norm_before_residual=True)
    assert not torch.allclose(outputs(load(head_dir, target))[0], states)


def test_default_aux_layers_come_from_the_depth_of_the_target(tmp_path: Path, target: Path) -> None:
    head = load(make_toy_eagle3(tmp_path / "head", target, aux_layers=None))
    assert head.feature_spec(TARGET).aux_layer_ids == (1, 3, 4)
    assert head.feature_spec(TargetInfo("t", "f", VOCAB, HIDDEN, 32)).aux_layer_ids == (1, 15, 28)
    with pytest.raises(CheckpointError, match="at least 7 layers"):
        head.feature_spec(TargetInfo("t", "f", VOCAB, HIDDEN, 6))


BROKEN: list[tuple[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = [
    (
        "missing",
        lambda t: {k: v for k, v in t.items() if k != "midlayer.hidden_norm.weight"},
        "midlayer.hidden_norm.weight",
    ),
    ("missing fc", lambda t: {k: v for k, v in t.items() if k != "fc.weight"}, "fc.weight"),
    ("missing d2t", lambda t: {k: v for k, v in t.items() if k != "d2t"}, "d2t"),
    ("unexpected", lambda t: t | {"midlayer.extra.weight": torch.zeros(2)}, "midlayer.extra.weight"),
    (
        "misshaped",
        lambda t: t | {"midlayer.mlp.up_proj.weight": torch.zeros(3, HIDDEN)},
        "midlayer.mlp.up_proj.weight",
    ),
    ("two aux", lambda t: t | {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, "fc.weight"),
    ("one fc_norm", lambda t: t | {"fc_norm.0.weight": torch.ones(HIDDEN)}, "fc_norm.1.weight"),
    ("absolute ids", lambda t: t | {"d2t": torch.arange(DRAFT_VOCAB) + 16}, "d2t"),
    ("repeated ids", lambda t: t | {"d2t": -torch.arange(DRAFT_VOCAB)}, "d2t"),
    ("other t2d", lambda t: t | {"t2d": ~t["t2d"]}, "t2d"),
    ("float d2t", lambda t: t | {"d2t": t["d2t"].float()}, "d2t"),
    (
        "twice",
        lambda t: t | {"layers.0.hidden_norm.weight": torch.ones(HIDDEN)},
        "layers.0.hidden_norm.weight",
    ),
]


@pytest.mark.parametrize(
    ("change", "key"), [(change, key) for _, change, key in BROKEN], ids=[name for name, _, _ in BROKEN]
)
def test_broken_checkpoints_are_refused_by_the_name_of_the_tensor(
    head_dir: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], key: str
) -> None:
    rewrite(head_dir, change)
    with pytest.raises(CheckpointError) as caught:
        load(head_dir)
    assert key in caught.value.message
    assert caught.value.field in (key, key.replace("layers.0.", "midlayer."))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 2 * HIDDEN}, "hidden_size"),
        ({"vocab_size": VOCAB + 1}, "vocab_size"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (
            {"use_aux_hidden_state": False, "eagle_config": None, "target_hidden_size": 2 * HIDDEN},
            "use_aux_hidden_state",
        ),
        ({"auto_map": {"AutoModel": "modeling.Head"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 1, 3]}},
            "eagle_aux_hidden_state_layer_ids",
        ),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states"),
        ({"eagle_config": "yes"}, "eagle_config"),
        ({"architectures": ["MedusaModel"]}, "architectures"),
        ({"model_type": "bert"}, "model_type"),
    ],
)
def test_broken_configurations_are_refused_by_the_name_of_the_key(
    head_dir: Path, changes: dict[str, Any], key: str
) -> None:
    configure(head_dir, **changes)
    with pytest.raises(CheckpointError) as caught:
        load(head_dir)
    assert caught.value.field == key
    assert key in caught.value.message


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"hidden_size": 2 * HIDDEN, "target_hidden_size": HIDDEN}, (2 * HIDDEN, HIDDEN)),
        ({"vocab_size": VOCAB + 1}, (VOCAB + 1, VOCAB)),
        ({"target_hidden_size": 2 * HIDDEN}, (3 * HIDDEN, 6 * HIDDEN)),
    ],
)
def test_sizes_that_differ_are_said_with_both_numbers_and_no_list(
    head_dir: Path, changes: dict[str, Any], numbers: tuple[int, int]
) -> None:
    configure(head_dir, **changes)
    with pytest.raises(CheckpointError) as caught:
        load(head_dir)
    assert all(str(number) in caught.value.message for number in numbers)
    assert "misshaped" not in caught.value.message


@pytest.mark.parametrize(
    ("misfit", "field"),
    [
        (TargetInfo("t", "f", VOCAB + 1, HIDDEN, 8), "vocab_size"),
        (TargetInfo("t", "f", VOCAB, HIDDEN * 2, 8), "hidden_size"),
        (TargetInfo("t", "f", VOCAB, HIDDEN, 3), "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_a_head_that_does_not_fit_the_target_is_refused_with_what_to_change(
    head_dir: Path, target: Path, misfit: TargetInfo, field: str
) -> None:
    with pytest.raises(CheckpointError, match="serve the target that this head") as caught:
        load(head_dir, target).feature_spec(misfit)
    assert caught.value.field == field


def test_the_fit_is_checked_at_start_when_the_target_is_at_hand(tmp_path: Path, head_dir: Path) -> None:
    other = make_toy_target(tmp_path / "other", vocab_size=VOCAB, hidden_size=16, num_heads=2, head_dim=8)
    settings = DraftSettings.load(
        {"draft": head_dir, "target_weights": other, "device": "cpu", "kv_tokens": 1024}
    )
    with pytest.raises(CheckpointError, match="hidden size"):
        build_engine(settings, CPU, torch.float32)


def test_only_what_is_borrowed_is_read_from_the_target(head_dir: Path, target: Path, tmp_path: Path) -> None:
    """A target folder without any other tensors is enough."""
    stripped = tmp_path / "stripped"
    stripped.mkdir()
    (stripped / "config.json").write_text((target / "config.json").read_text())
    save_file({EMBEDDING: read_target_tensor(target, EMBEDDING)}, str(stripped / "model.safetensors"))
    settings = DraftSettings.load(
        {"draft": head_dir, "target_weights": stripped, "device": "cpu", "kv_tokens": 1024}
    )
    engine = build_engine(settings, CPU, torch.float32)
    assert not engine.strategy.missing()
    save_file({"other": torch.zeros(1)}, str(stripped / "model.safetensors"))
    fresh = build_engine(settings.model_copy(update={"target_weights": None}), CPU, torch.float32)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        borrow(fresh.strategy, stripped, CPU, torch.float32)


def test_a_head_that_cannot_borrow_a_wider_embedding_says_so(head_dir: Path) -> None:
    rewrite(head_dir, lambda tensors: tensors | {"fc.weight": torch.zeros(HIDDEN, 3 * 2 * HIDDEN)})
    configure(head_dir, target_hidden_size=2 * HIDDEN)
    with pytest.raises(CheckpointError, match="target's does not fit"):
        load(head_dir)


def test_the_vocabulary_maps_by_offsets() -> None:
    vocabulary = DraftVocabulary.from_tensors(torch.tensor([2, 2, 5]), None, 9)
    assert vocabulary.target_ids(CPU).tolist() == [2, 3, 7]
