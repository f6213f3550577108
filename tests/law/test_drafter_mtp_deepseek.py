"""MTP layers of a DeepSeek-V3 checkpoint: log-probs and output.

The log-probs equal those of transformers' layers after the published joint projection. The output equals
plain decoding.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from support.models import family_models, toy_deepseek, toy_mtp
from support.suite.compute_device import DEVICE

from outrider.services.doctor.examine import examine
from outrider.services.doctor.finding import Severity
from outrider.services.doctor.pair import Pair
from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.sessions.session import Ask, PeerId
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.errors import CheckpointError
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder
from outrider.shared.obs.logging import configure_logging
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftBatch, DraftShape

pytestmark = pytest.mark.xdist_group("drafter_mtp_deepseek")

torch.set_num_threads(1)
VOCAB, HIDDEN, LAYERS = family_models.VOCAB, 64, family_models.LAYERS
PREFIX = f"model.layers.{LAYERS}."
PEER = PeerId(1)


def prefix_of(layer: int) -> str:
    return f"model.layers.{LAYERS + layer}."


def add_layers(path: Path, count: int) -> Path:
    """Add MTP layers to a random DeepSeek-V3. They repeat its last layers, after their own joints."""
    tensors = load_file(str(path / "model.safetensors"))
    generator = torch.Generator().manual_seed(3)
    added: dict[str, torch.Tensor] = {}
    for index in range(count):
        model_layer, prefix = f"model.layers.{LAYERS - 1 - index}.", prefix_of(index)
        added |= {
            name.replace(model_layer, prefix): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(model_layer)
        }
        added[f"{prefix}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2
        for name in ("enorm", "hnorm", "shared_head.norm"):
            added[f"{prefix}{name}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=generator)
        added[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        added[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | added, str(path / "model.safetensors"))
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Number of MTP layers → checkpoint folder."""
    return {
        count: add_layers(
            family_models.save("deepseek-v3", tmp_path_factory.mktemp(f"deepseek{count}")), count
        )
        for count in (1, 2, 3)
    }


@pytest.fixture(scope="module")
def folder(folders: dict[int, Path]) -> Path:
    return folders[1]


def reference_logprobs(folder: Path, layers: int, tokens: list[int], path: list[int]) -> list[float]:
    """Return the log-prob of each token of `path` after the committed `tokens`.

    Every log-prob is computed by a pass over the whole text.
    """
    model = family_models.reference("deepseek-v3")
    weights = load_file(str(folder / "model.safetensors"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return scaled * weights[name]

    def run(layer: int, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        prefix, rows = prefix_of(layer), len(tokens)
        embedded = model.model.embed_tokens(torch.tensor(tokens))
        joined = torch.cat(
            [norm(embedded, f"{prefix}enorm.weight"), norm(states, f"{prefix}hnorm.weight")], -1
        )
        joined = (joined @ weights[f"{prefix}eh_proj.weight"].T)[None]
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        angles = model.model.rotary_emb(joined, positions)
        block = model.model.layers[LAYERS - 1 - layer]
        out = block(joined, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return norm(
            (out[0] if isinstance(out, tuple) else out).view(rows, -1), f"{prefix}shared_head.norm.weight"
        )

    logprobs = []
    with torch.no_grad():
        inputs = states = model.model(torch.tensor([tokens])).last_hidden_state[
            0, :-1
        ]  # states after the final norm
        for level, token in enumerate(path):
            # The next layer reads the states of the layer before it. Once the layers are used up, the last
            # one reads its own last state, one position further.
            inputs = states if level < layers else torch.cat([inputs, states[-1:]])
            first = 1 + min(level, layers - 1)
            states = run(min(level, layers - 1), [*tokens, *path][first : first + inputs.shape[0]], inputs)
            logprobs.append(float(torch.log_softmax(model.lm_head(states[-1]), -1)[token]))
    return logprobs


def make_engine(folder: Path, draft: Path | None = None) -> DraftEngine:
    settings = DraftSettings.load(
        {"target_weights": folder, "draft": draft, "device": str(DEVICE), "kv_tokens": 2048, "page_size": 4}
    )
    return build_engine(settings, DEVICE, torch.float32)


def drafted(
    folder: Path, tokens: list[int], features: torch.Tensor, shape: DraftShape, draft: Path | None = None
) -> DraftBatch:
    """Return the tree that a new engine drafts after all tokens."""
    engine = make_engine(folder, draft)
    fence = Fence(1, 1, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))
    engine.open(PEER, SequenceOpen(fence, tokens, 0, 0.0))
    engine.add_features(PEER, 1, 1, 0, features[: len(tokens) - 1])
    engine.commit(PEER, Commit(fence, len(tokens), (), None), Ask(1, shape, 0.0))
    (proposal,) = engine.step().proposals
    return proposal.trees


def case(length: int) -> tuple[list[int], torch.Tensor]:
    """Return random tokens and the target's last hidden states."""
    rng = random.Random(length)
    tokens = [rng.randrange(VOCAB) for _ in range(length)]
    return tokens, family_models.reference("deepseek-v3").model(torch.tensor([tokens])).last_hidden_state[
        0
    ].detach()


@pytest.mark.parametrize("shape", [DraftShape(4, 1, 5), DraftShape(4, 3, 14)])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("length", [2, 3, 12])
def test_log_probs_are_those_of_the_published_computation(
    folders: dict[int, Path], length: int, layers: int, shape: DraftShape
) -> None:
    tokens, features = case(length)
    trees = drafted(folders[layers], tokens, features, shape)
    assert trees.logprobs is not None
    paths: list[list[int]] = [[]]
    for node in range(1, int(trees.num_nodes[0])):
        paths.append([*paths[int(trees.parents[0, node])], int(trees.tokens[0, node])])
        expected = reference_logprobs(folders[layers], layers, tokens, paths[node])[-1]
        assert float(trees.logprobs[0, node]) == pytest.approx(expected, abs=2e-4)
    assert len(paths) == shape.max_nodes


def test_fp8_layers_draft_as_the_matrices_that_they_stand_for(
    folders: dict[int, Path], tmp_path: Path
) -> None:
    """The MTP layer is quantized as in the DeepSeek-V3 release: e4m3 blocks, except for joint and norms."""
    meant = family_models.store_fp8(
        tmp_path / "fp8", folders[2], (16, 24), keep=("eh_proj", "embed_tokens", "shared_head")
    )
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text((folders[2] / "config.json").read_text())
    save_file(meant, str(tmp_path / "wide" / "model.safetensors"))
    stored = load_file(str(tmp_path / "fp8" / "model.safetensors"))
    assert stored[f"{PREFIX}self_attn.o_proj.weight"].dtype is torch.float8_e4m3fn
    tokens, features = case(12)
    got, want = (drafted(tmp_path / name, tokens, features, DraftShape(4, 3, 14)) for name in ("fp8", "wide"))
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.parents, want.parents)
    assert got.logprobs is not None
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=1e-5)
    scale = f"{PREFIX}self_attn.o_proj.weight_scale_inv"
    save_file(
        {name: tensor for name, tensor in stored.items() if name != scale},
        str(tmp_path / "fp8" / "model.safetensors"),
    )
    with pytest.raises(CheckpointError) as caught:
        make_engine(tmp_path / "fp8")
    assert caught.value.field == scale


def test_copies_of_the_targets_tensors_are_ignored_in_fp8_too(folder: Path, tmp_path: Path) -> None:
    """Quantizers that select tensors by shape also convert the copies of embedding and head, with scales."""
    family_models.store_fp8(
        tmp_path / "fp8", folder, (16, 24), keep=("eh_proj", "model.embed_tokens", "lm_head")
    )
    copy = f"{PREFIX}shared_head.head.weight"
    stored = load_file(str(tmp_path / "fp8" / "model.safetensors"))
    assert stored[copy].dtype is torch.float8_e4m3fn
    make_engine(tmp_path / "fp8")
    save_file(stored | {f"{copy}_scale": torch.ones(1)}, str(tmp_path / "fp8" / "model.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        make_engine(tmp_path / "fp8")
    assert caught.value.field == f"{copy}_scale"


def export_nextn(source: Path, folder: Path) -> Path:
    """Write the MTP layer of a model as SGLang's export_deepseek_nextn.py does: as layer 0 of a folder."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    exported = {"num_hidden_layers": 1, "architectures": ["DeepseekV3ForCausalLMNextN"]}
    (folder / "config.json").write_text(json.dumps(config | exported))
    tensors = {
        name.replace(PREFIX, "model.layers.0."): tensor
        for name, tensor in load_file(str(source / "model.safetensors")).items()
        if name.startswith(PREFIX) and "embed_tokens" not in name and "shared_head.head" not in name
    }
    file = "nextn_layer_parameters.safetensors"
    save_file(tensors, str(folder / file))
    index = json.dumps({"weight_map": dict.fromkeys(tensors, file)})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def test_an_exported_layer_drafts_as_in_the_targets_own_folder(folder: Path, tmp_path: Path) -> None:
    exported = export_nextn(folder, tmp_path / "nextn")
    tokens, features = case(12)
    shape = DraftShape(4, 3, 14)
    got, want = drafted(folder, tokens, features, shape, exported), drafted(folder, tokens, features, shape)
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.parents, want.parents)
    assert got.logprobs is not None
    assert want.logprobs is not None
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=0, rtol=0)
    report = examine(Pair(folder, exported, Algorithm.AUTO, DEVICE, torch.float32))
    assert [one.message for one in report.findings if one.severity is Severity.REFUSED] == []
    assert any("1 MTP layer of nextn" in one.message for one in report.findings)


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_from_the_targets_tensor_is_warned_about(
    copy: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The layers of another model have other copies, also if all sizes are equal."""
    name = f"{PREFIX}{copy}.weight"

    def warnings(draft: Path) -> list[str]:
        report = examine(Pair(folder, draft, Algorithm.MTP, DEVICE, torch.float32))
        return [one.field for one in report.findings if "belong to another model" in one.message]

    assert warnings(folder) == []
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(str(folder / "model.safetensors"))
    save_file(tensors | {name: torch.randn(VOCAB, HIDDEN)}, str(other / "model.safetensors"))
    assert warnings(other) == [name]
    configure_logging("draft", "warning")
    make_engine(folder, other)
    assert name in capfd.readouterr().err
    wrong = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    save_file(tensors | wrong, str(other / "model.safetensors"))
    assert warnings(other) == ["model.embed_tokens.weight"], "a complete model that is not the target"


@pytest.fixture(scope="module")
def trained() -> toy_deepseek.Model:
    """A model of two layers with two MTP layers, all trained together."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = toy_deepseek.Model(mtp_layers=2)
    toy_mtp.fit(model, steps=130)
    return model


def trained_tokens_per_round(
    folder: Path, shape: tuple[int, int, int], prompts: list[list[int]], expected: list[list[int]]
) -> float:
    """Decode all prompts in one batch, check each answer, and return the tokens per round."""
    target = load_toy(folder)
    settings = DraftSettings.load(
        {"target_weights": folder, "kv_tokens": 4096, "page_size": 4, "speculative_algorithm": "MTP"}
    )
    harness = make_harness(target, drafter_beside(target, settings), prefill_chunk=16)
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, len(expected[index]), request_id=str(index), shape=shape)
    harness.run()
    for index, prompt in enumerate(prompts):
        assert_same_tokens(target, prompt, expected[index], harness.sink.tokens[str(index)])
    stats = [harness.sink.finished[str(index)].speculation for index in range(len(prompts))]
    return sum(len(tokens) - 1 for tokens in expected) / sum(one.rounds for one in stats)


def test_trained_layers_are_accepted_as_those_of_a_plain_reference(
    trained: toy_deepseek.Model, tmp_path: Path
) -> None:
    folder = toy_deepseek.save(trained, tmp_path / "deepseek")
    texts = toy_mtp.sample_text(6, 40, torch.Generator().manual_seed(5)).tolist()
    prompts = [text[:length] for text, length in zip(texts, (2, 3, 9, 16, 25, 40), strict=True)]
    expected = [trained.greedy(prompt, 24) for prompt in prompts]
    for depth in (1, 2, 4):
        counts = [toy_mtp.reference_accept_length(trained, prompt, 24, depth) for prompt in prompts]
        reference = sum(tokens for tokens, _ in counts) / sum(rounds for _, rounds in counts)
        found = trained_tokens_per_round(folder, (depth, 1, depth + 1), prompts, expected)
        print(f"depth {depth}: {found:.3f} tokens a round, the reference {reference:.3f}")
        assert abs(found - reference) <= 0.02 * reference
        assert found >= (2.0 if depth > 1 else 1.6)
    assert trained_tokens_per_round(folder, (4, 3, 12), prompts, expected) >= reference
    # Swapped halves of a joint projection show in the accept length.
    tensors = load_file(str(folder / "model.safetensors"))
    joint = f"model.layers.{trained.layers}.eh_proj.weight"
    tensors[joint] = tensors[joint].roll(toy_deepseek.HIDDEN, dims=1)
    save_file(tensors, str(folder / "model.safetensors"))
    assert trained_tokens_per_round(folder, (4, 1, 5), prompts, expected) < 0.9 * reference


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return load_toy(folder)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=4)]
)
def test_output_is_that_of_plain_decoding(
    target: Decoder, folders: dict[int, Path], sampling: SamplingParams, layers: int
) -> None:
    settings = DraftSettings.load(
        {"target_weights": folders[layers], "kv_tokens": 4096, "speculative_algorithm": "NEXTN"}
    )
    harness = make_harness(target, drafter_beside(target, settings))
    prompts = [[5], [3, 1, 4, 1, 5, 9, 2, 6], list(range(30))]
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 16, request_id=str(index), sampling=sampling, shape=(3, 2, 8))
    harness.run()
    for index, prompt in enumerate(prompts):
        plain = generate_plain(target, NoDrafter(), prompt, 16, sampling=sampling)
        assert_same_tokens(target, prompt, plain, harness.sink.tokens[str(index)], sampling)
        assert harness.sink.finished[str(index)].speculation.draft_tokens > 0


@pytest.mark.parametrize(
    ("drop", "add", "field"),
    [
        ("enorm.weight", {}, "enorm.weight"),
        ("mlp.gate.weight", {}, "mlp.gate.weight"),
        ("", {"surprise.weight": torch.zeros(1)}, "surprise.weight"),
        ("", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
    ],
)
def test_incomplete_and_unknown_tensors_are_named(
    folder: Path, tmp_path: Path, drop: str, add: dict[str, object], field: str
) -> None:
    tensors = load_file(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    tensors.pop(f"{PREFIX}{drop}", None)
    tensors |= {f"{PREFIX}{name}": value for name, value in add.items() if isinstance(value, torch.Tensor)}
    config |= {name: value for name, value in add.items() if isinstance(value, int)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        make_engine(tmp_path)
    assert caught.value.field == (field if field in config else f"{PREFIX}{field}")
