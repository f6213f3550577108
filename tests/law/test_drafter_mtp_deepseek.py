"""The MTP layer of a DeepSeek-V3 checkpoint: log-probs equal transformers' layer behind the published joint, and the output law holds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import family_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from target_harness import assert_same_tokens, generate_plain, load_toy, make_harness

from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.session import Ask, PeerId
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafter import NoDrafter
from outrider.services.target.request import SamplingParams
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape

torch.set_num_threads(1)
VOCAB, HIDDEN, LAYERS = family_models.VOCAB, 64, family_models.LAYERS
PREFIX = f"model.layers.{LAYERS}."
PEER = PeerId(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3 whose MTP layer repeats its last layer behind a joint of its own."""
    path = family_models.save("deepseek-v3", tmp_path_factory.mktemp("deepseek"))
    tensors = load_file(str(path / "model.safetensors"))
    last = f"model.layers.{LAYERS - 1}."
    layer = {name.replace(last, PREFIX): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    generator = torch.Generator().manual_seed(3)
    layer[f"{PREFIX}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{PREFIX}{name}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=generator)
    layer[f"{PREFIX}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    layer[f"{PREFIX}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | layer, str(path / "model.safetensors"))
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def reference_logprobs(folder: Path, tokens: list[int], extra: int) -> torch.Tensor:
    """Return log-probs ``[1 + extra, vocab]``: after the committed tokens, and after each of the last `extra` given ones.

    The tokens before those `extra` are committed; rows of the others take the layer's own state for a feature.
    """
    model = family_models.reference("deepseek-v3")
    weights = load_file(str(folder / "model.safetensors"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return scaled * weights[f"{PREFIX}{name}.weight"]

    committed = len(tokens) - extra
    with torch.no_grad():
        features = model.model(torch.tensor([tokens[:committed]])).last_hidden_state[0, :-1]  # after the final norm
        for _ in range(extra + 1):
            rows = features.shape[0]
            embedded = model.model.embed_tokens(torch.tensor(tokens[1 : 1 + rows]))
            joined = torch.cat([norm(embedded, "enorm"), norm(features, "hnorm")], -1) @ weights[f"{PREFIX}eh_proj.weight"].T
            positions = torch.arange(rows)[None]
            mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
            angles = model.model.rotary_emb(joined[None], positions)
            out = model.model.layers[-1](joined[None], attention_mask=mask, position_ids=positions, position_embeddings=angles)
            states = norm((out[0] if isinstance(out, tuple) else out).view(rows, -1), "shared_head.norm")
            features = torch.cat([features, states[-1:]])
        return torch.log_softmax(model.lm_head(states[-1 - extra :]), -1)


def make_engine(folder: Path) -> DraftEngine:
    settings = DraftSettings.load({"target_weights": folder, "device": "cpu", "kv_tokens": 2048, "page_size": 4})
    return build_engine(settings, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("length", [2, 3, 12])
def test_log_probs_are_those_of_the_published_computation(folder: Path, length: int) -> None:
    rng = random.Random(length)
    tokens = [rng.randrange(VOCAB) for _ in range(length)]
    features = family_models.reference("deepseek-v3").model(torch.tensor([tokens])).last_hidden_state[0].detach()
    engine = make_engine(folder)
    fence = Fence(1, 1, length, extend_prefix_hash(FNV_OFFSET, tokens))
    engine.open(PEER, SequenceOpen(fence, tokens, 0, 0.0))
    engine.add_features(PEER, 1, 1, 0, features[: length - 1])
    engine.commit(PEER, Commit(fence, length, (), None), Ask(1, DraftShape(3, 1, 4), 0.0))
    (proposal,) = engine.step().proposals
    chain = proposal.trees.tokens[0, 1:].tolist()
    expected = reference_logprobs(folder, [*tokens, *chain[:2]], 2)
    assert proposal.trees.logprobs is not None
    for level, token in enumerate(chain):
        assert float(expected[level, token]) == pytest.approx(float(proposal.trees.logprobs[0, 1 + level]), abs=1e-4)
        assert int(expected[level].argmax()) == token


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return load_toy(folder)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=4)])
def test_output_is_that_of_plain_decoding(target: Decoder, folder: Path, sampling: SamplingParams) -> None:
    settings = DraftSettings.load({"target_weights": folder, "kv_tokens": 4096, "speculative_algorithm": "NEXTN"})
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
def test_incomplete_and_unknown_tensors_are_named(folder: Path, tmp_path: Path, drop: str, add: dict[str, object], field: str) -> None:
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
