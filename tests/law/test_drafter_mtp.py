"""MTP layers of a trained toy model, run by the real engine: output and accept length.

The output equals plain decoding, and the accept length equals that of a plain reference drafter.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toy_mtp import (
    HIDDEN,
    VOCAB,
    Model,
    reference_accept_length,
    sample_text,
    save,
    sharp_model,
    train,
)
from support.outputs.shifted_levels import shift_levels
from support.suite.compute_device import DEVICE

from outrider.services.draft.build import build_engine
from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.draft.sessions.session import Ask, PeerId
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.strategies.mtp_model import MtpModel
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.errors import CheckpointError
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftBatch, DraftShape

pytestmark = pytest.mark.xdist_group("drafter_mtp")

torch.set_num_threads(1)
COUNT = 24
PROMPTS = [
    row[:length]
    for row, length in zip(
        sample_text(6, 40, torch.Generator().manual_seed(5)).tolist(), (2, 3, 9, 16, 25, 40), strict=True
    )
]


@pytest.fixture(scope="module")
def model() -> Model:
    """A target of two layers with two MTP layers, all trained together."""
    return train(layers=2, mtp_layers=2, steps=130)


@pytest.fixture(scope="module")
def folder(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return load_toy(folder)


def drafter_for(target: Decoder, folder: Path, **settings: object) -> InprocDrafter:
    return drafter_beside(
        target, DraftSettings.load({"target_weights": folder, "kv_tokens": 8192, "page_size": 4, **settings})
    )


def run(
    target: Decoder,
    folder: Path,
    shape: tuple[int, int, int],
    sampling: SamplingParams | None = None,
    **options: int,
) -> Harness:
    """Decode all prompts in one batch, and check each answer against plain decoding."""
    harness = make_harness(target, drafter_for(target, folder), prefill_chunk=16, **options)
    for index, prompt in enumerate(PROMPTS):
        harness.submit(prompt, COUNT, request_id=str(index), shape=shape, sampling=sampling)
    harness.run()
    for index, prompt in enumerate(PROMPTS):
        plain = generate_plain(
            target, NoDrafter(), prompt, COUNT, **({"sampling": sampling} if sampling else {})
        )
        assert_same_tokens(target, prompt, plain, harness.sink.tokens[str(index)], sampling)
    return harness


def tokens_per_round(harness: Harness) -> float:
    finished = harness.sink.finished.values()
    return sum(one.completion_tokens - 1 for one in finished) / sum(
        one.speculation.rounds for one in finished
    )


def reference(model: Model, depth: int) -> float:
    emitted, rounds = zip(
        *(reference_accept_length(model, prompt, COUNT, depth) for prompt in PROMPTS), strict=True
    )
    return sum(emitted) / sum(rounds)


def test_the_target_is_the_model_that_was_trained(model: Model, target: Decoder) -> None:
    for prompt in PROMPTS:
        assert_same_tokens(
            target, prompt, model.greedy(prompt, COUNT), generate_plain(target, NoDrafter(), prompt, COUNT)
        )


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_chains_are_accepted_as_those_of_a_plain_reference(
    model: Model, target: Decoder, folder: Path, depth: int
) -> None:
    """Depth 1 uses the first layer only, depth 2 both. Depth 4 repeats the last layer on its own states."""
    expected = reference(model, depth)
    found = tokens_per_round(run(target, folder, (depth, 1, depth + 1)))
    print(f"depth {depth}: {found:.3f} tokens a round, the reference {expected:.3f}")
    assert abs(found - expected) <= 0.02 * expected
    assert found >= (2.0 if depth > 1 else 1.6)


@pytest.mark.parametrize("shape", [(2, 3, 8), (4, 3, 12), (5, 4, 24)])
def test_trees_accept_more_than_chains(
    model: Model, target: Decoder, folder: Path, shape: tuple[int, int, int]
) -> None:
    assert tokens_per_round(run(target, folder, shape)) >= reference(model, shape[0])


@pytest.mark.parametrize("shape", [(2, 1, 3), (4, 3, 12)])
def test_seeded_output_is_that_of_plain_decoding(
    target: Decoder, folder: Path, shape: tuple[int, int, int]
) -> None:
    for seed in (1, 2):
        assert tokens_per_round(run(target, folder, shape, SamplingParams(temperature=1.0, seed=seed))) > 1.6


def test_retracted_sequences_draft_as_before(target: Decoder, folder: Path, model: Model) -> None:
    harness = run(target, folder, (2, 1, 3), num_pages=14, page_size=8)
    assert harness.scheduler.num_retractions > 0, "the pool must be too small for this test"
    assert tokens_per_round(harness) > 0.9 * reference(model, 2)


def test_one_layer_serves_all_levels(tmp_path: Path) -> None:
    model = train(layers=1, mtp_layers=1, steps=60)
    folder = save(model, tmp_path / "mimo")
    target = load_toy(folder)
    for depth in (1, 3):
        expected = reference(model, depth)
        assert abs(tokens_per_round(run(target, folder, (depth, 1, depth + 1))) - expected) <= 0.02 * expected


def test_what_a_drafter_gets_wrong_shows_in_its_accept_length(
    target: Decoder, folder: Path, tmp_path: Path
) -> None:
    """Covers swapped halves of the projection, and swapped layers."""
    right = tokens_per_round(run(target, folder, (2, 1, 3)))
    weights = load_file(str(folder / "model.safetensors"))
    first, second = "model.mtp_layers.0.", "model.mtp_layers.1."
    projection = weights[f"{first}input_proj.weight"]
    layers_swapped = {
        name: weights[name.replace(first, "?").replace(second, first).replace("?", second)]
        for name in weights
        if "mtp_layers" in name
    }
    for name, changed in {
        "halves": {
            f"{first}input_proj.weight": torch.cat([projection[:, HIDDEN:], projection[:, :HIDDEN]], dim=1)
        },
        "layers": layers_swapped,
    }.items():
        broken = save_broken(folder, tmp_path / name, weights | changed)
        assert tokens_per_round(run(target, broken, (2, 1, 3))) < 0.9 * right


def test_a_chain_run_by_the_first_layer_alone_shows_in_its_accept_length(
    target: Decoder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tokens_per_round(run(target, folder, (3, 1, 4)))
    monkeypatch.setattr(MtpModel, "stage", lambda _, level: 0)
    assert tokens_per_round(run(target, folder, (3, 1, 4))) < 0.95 * right


def largest_error(model: Model, folder: Path, length: int) -> float:
    """Return the largest difference between the log-probs of a drafted chain of 5 and the reference.

    Returns infinity if the tokens differ.
    """
    settings = DraftSettings.load(
        {"target_weights": folder, "device": str(DEVICE), "kv_tokens": 2048, "page_size": 4}
    )
    engine = build_engine(settings, DEVICE, torch.float32)
    tokens = sample_text(1, length, torch.Generator().manual_seed(length))[0].tolist()
    features = model.hidden(torch.tensor([tokens]))[0].detach()
    peer, fence = PeerId(1), Fence(1, 1, length, extend_prefix_hash(FNV_OFFSET, tokens))
    engine.open(peer, SequenceOpen(fence, tokens, 0, 0.0))
    for row in range(length - 1):  # one by one, so that each layer's rows arrive in as many parts as possible
        engine.add_features(peer, 1, 1, row, features[row : row + 1])
        engine.step()
    engine.commit(peer, Commit(fence, length, (), None), Ask(1, DraftShape(5, 1, 6), 0.0))
    (proposal,) = engine.step().proposals
    expected, logprobs = model.draft(tokens, 5)
    if proposal.trees.tokens[0, 1:].tolist() != expected:
        return float("inf")
    assert proposal.trees.logprobs is not None
    return float((proposal.trees.logprobs[0, 1:].cpu() - torch.tensor(logprobs)).abs().max())


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_log_probs_of_a_chain_are_the_references(
    tmp_path: Path, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharp_model(layers)
    folder = save(model, tmp_path)
    for length in (2, 3, 4, 5, 13):
        assert largest_error(model, folder, length) < 1e-4
    shift_levels(monkeypatch, 1)
    assert largest_error(model, folder, 13) > 1e-3


class Session:
    """One sequence with its own engine, and the features that the target would send."""

    def __init__(self, model: Model, folder: Path) -> None:
        settings = DraftSettings.load(
            {"target_weights": folder, "device": str(DEVICE), "kv_tokens": 2048, "page_size": 4}
        )
        self._model = model
        self._engine = build_engine(settings, DEVICE, torch.float32)
        self._peer, self._epoch = PeerId(1), 0

    def open(self, tokens: list[int], parts: int) -> int:
        """Open the session, or open it again, and send all features that the engine does not have.

        Args:
            tokens: Tokens of the sequence.
            parts: Features to send before each step of the engine.

        Returns:
            The row of the first feature sent.
        """
        self._epoch += 1
        fence = Fence(1, self._epoch, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))
        held = self._engine.open(self._peer, SequenceOpen(fence, tokens, 0, 0.0)).have_len
        features = self._model.hidden(torch.tensor([tokens]))[0].detach()
        for base in range(held, len(tokens) - 1, parts):
            self._engine.add_features(
                self._peer, 1, self._epoch, base, features[base : min(base + parts, len(tokens) - 1)]
            )
            self._engine.step()
        return held

    def tree(self, tokens: list[int], shape: DraftShape) -> DraftBatch:
        """Request a tree after all tokens."""
        fence = Fence(1, self._epoch, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))
        self._engine.commit(self._peer, Commit(fence, len(tokens), (), None), Ask(1, shape, 0.0))
        (proposal,) = self._engine.step().proposals
        return proposal.trees


def largest_tree_error(model: Model, tokens: list[int], trees: DraftBatch) -> float:
    """Return the largest difference between a node's log-prob and the reference's for its path."""
    assert trees.logprobs is not None
    paths: list[list[int]] = [[]]
    worst = 0.0
    for node in range(1, int(trees.num_nodes[0])):
        paths.append([*paths[int(trees.parents[0, node])], int(trees.tokens[0, node])])
        _, expected = model.draft(tokens, len(paths[node]), paths[node])
        worst = max(worst, abs(expected[-1] - float(trees.logprobs[0, node])))
    return worst


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_every_node_of_a_tree_sees_its_whole_path_in_every_layer(tmp_path: Path, layers: int) -> None:
    model = sharp_model(layers)
    folder = save(model, tmp_path)
    for length in (2, 3, 4, 11):
        session = Session(model, folder)
        tokens = sample_text(1, length, torch.Generator().manual_seed(length))[0].tolist()
        session.open(tokens, parts=3)
        trees = session.tree(tokens, DraftShape(6, 3, 30))
        assert int(trees.depths[0].max()) >= 4
        assert largest_tree_error(model, tokens, trees) < 1e-4


@pytest.mark.parametrize("parts", [1, 2, 16])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_a_reopened_session_keeps_the_rows_of_the_common_prefix(
    tmp_path: Path, layers: int, parts: int
) -> None:
    """After a session is cut back and continues differently, all layers have rows of the second text only."""
    model = sharp_model(layers)
    session = Session(model, save(model, tmp_path))
    text, other = sample_text(2, 24, torch.Generator().manual_seed(1)).tolist()
    session.open(text, parts=5)
    session.tree(text, DraftShape(4, 2, 9))  # its scratch rows must leave no trace
    for shared, length in ((17, 20), (20, 20), (3, 24), (24, 24)):
        tokens = [*text[:shared], *other[shared:length]]
        held = session.open(tokens, parts)
        assert held == max(0, shared - 1 - (shared == length) - (layers - 1)) or shared == 24
        assert held > 0 or shared == 3
        trees = session.tree(tokens, DraftShape(5, 2, 12))
        assert largest_tree_error(model, tokens, trees) < 1e-4
        text = tokens + text[len(tokens) :]


def save_broken(folder: Path, to: Path, weights: dict[str, torch.Tensor]) -> Path:
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(to / "model.safetensors"))
    return to


def test_layers_of_another_target_are_refused(target: Decoder, tmp_path: Path) -> None:
    torch.manual_seed(0)
    other = save(Model(1, 1), tmp_path / "other", vocab_size=VOCAB + 1)
    with pytest.raises(CheckpointError) as caught:
        drafter_for(target, other)
    assert caught.value.field == "vocab_size"


def test_three_layers_and_random_prompts_change_nothing(tmp_path: Path) -> None:
    torch.manual_seed(3)
    folder = save(Model(1, 3), tmp_path)
    target = load_toy(folder)
    rng = random.Random(0)
    harness = make_harness(target, drafter_for(target, folder), max_running=2, prefill_chunk=8)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 30]))] for _ in range(6)]
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 12, request_id=str(index), shape=(rng.randint(1, 5), rng.randint(1, 3), 12))
    harness.run()
    for index, prompt in enumerate(prompts):
        assert_same_tokens(
            target, prompt, generate_plain(target, NoDrafter(), prompt, 12), harness.sink.tokens[str(index)]
        )


def test_a_token_map_restricts_what_is_drafted(target: Decoder, folder: Path, tmp_path: Path) -> None:
    kept = list(range(1, VOCAB, 2))
    (tmp_path / "map.json").write_text(json.dumps(kept))
    harness = make_harness(target, drafter_for(target, folder, speculative_token_map=tmp_path / "map.json"))
    harness.submit(PROMPTS[-1], COUNT, request_id="a", shape=(3, 2, 8), trace=True)
    harness.run()
    assert_same_tokens(
        target, PROMPTS[-1], generate_plain(target, NoDrafter(), PROMPTS[-1], COUNT), harness.sink.tokens["a"]
    )
    drafted = {node.token for one in harness.sink.rounds["a"] for node in one.nodes[1:]}
    assert drafted
    assert drafted <= set(kept)
