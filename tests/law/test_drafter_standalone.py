"""Standalone draft models in the real engine: output equals plain decoding, and accept lengths are right."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toys import make_toy_target

from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.errors import CheckpointError
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 64
SHAPES = [(1, 1, 2), (5, 1, 6), (5, 4, 16)]
UNPRUNED = [(1, 1, 2), (5, 1, 6), (3, 4, 37)]
"""Trees that keep every candidate. Pruning may drop the right path in favour of shallow siblings' scores."""
LENGTH = 24


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, planted=2.5, num_layers=4)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_toy(target_dir)


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model trained on the same rule: two layers, another head size, its own weights."""
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 64}
    return make_toy_target(tmp_path_factory.mktemp("small"), vocab_size=VOCAB, planted=2.5, seed=9, **sizes)


def drafter_for(target: Decoder, draft: Path, **settings: object) -> InprocDrafter:
    return drafter_beside(
        target, DraftSettings.load({"draft": draft, "kv_tokens": 8192, "page_size": 4, **settings})
    )


def run(
    target: Decoder,
    draft: Path,
    prompts: list[list[int]],
    sampling: SamplingParams,
    shape: tuple[int, int, int],
) -> Harness:
    """Decode every prompt, and check each answer against plain decoding."""
    harness = make_harness(target, drafter_for(target, draft), prefill_chunk=32)
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, LENGTH, request_id=str(index), sampling=sampling, shape=shape)
    harness.run()
    for index, prompt in enumerate(prompts):
        plain = generate_plain(target, NoDrafter(), prompt, LENGTH, sampling=sampling)
        assert_same_tokens(target, prompt, plain, harness.sink.tokens[str(index)], sampling)
    return harness


def accept_length(harness: Harness) -> float:
    finished = harness.sink.finished.values()
    return sum(one.speculation.accept_length for one in finished) / len(finished)


PROMPTS = [[random.Random(length).randrange(VOCAB) for _ in range(length)] for length in (1, 2, 40)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_is_that_of_plain_decoding_with_a_smaller_draft(
    target: Decoder, small_dir: Path, shape: tuple[int, int, int], temperature: float
) -> None:
    harness = run(target, small_dir, PROMPTS, SamplingParams(temperature=temperature, seed=11), shape)
    if shape[0] > 1:
        assert accept_length(harness) >= 2.0


@pytest.mark.parametrize("shape", UNPRUNED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_equal_to_the_target_is_accepted_in_full(
    target: Decoder, target_dir: Path, shape: tuple[int, int, int], temperature: float
) -> None:
    """True only if each row attends to its own path at the right position and the noise is the target's."""
    harness = run(target, target_dir, PROMPTS, SamplingParams(temperature=temperature, seed=5), shape)
    for finished in harness.sink.finished.values():
        histogram = finished.speculation.accepted_histogram
        full = sum(histogram[shape[0] :])
        assert full >= sum(histogram) - 1, "only the last round may be shorter"


def test_it_follows_what_it_proposed_nothing_for(target: Decoder, target_dir: Path) -> None:
    """After retraction and reopening, rows of the common prefix are kept; all others are computed again."""
    harness = make_harness(target, drafter_for(target, target_dir), num_pages=20, page_size=8)
    prompts = [[(start + index) % VOCAB for index in range(20)] for start in range(4)]
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 60, request_id=str(index), shape=(3, 2, 8))
    harness.run()
    assert harness.scheduler.num_retractions > 0, "the pool must be too small for this test"
    for index, prompt in enumerate(prompts):
        assert_same_tokens(
            target, prompt, generate_plain(target, NoDrafter(), prompt, 60), harness.sink.tokens[str(index)]
        )
        assert harness.sink.finished[str(index)].speculation.accept_length > 2.5


def copy_of(folder: Path, to: Path, tokens: dict[str, int], **config: object) -> Path:
    """Copy a model with changed configuration keys and a tokenizer of these tokens."""
    shutil.copytree(folder, to)
    (to / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": tokens}, "added_tokens": [{"id": 9, "content": "<s>"}]})
    )
    raw = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(raw))
    return to


def test_another_tokenizer_is_refused_by_its_first_token(
    target: Decoder, target_dir: Path, small_dir: Path, tmp_path: Path
) -> None:
    mine = copy_of(small_dir, tmp_path / "draft", {"a": 0, "b": 2})
    theirs = copy_of(target_dir, tmp_path / "target", {"a": 0, "b": 1})
    with pytest.raises(CheckpointError, match=r"'b' is id 2 .* and id 1") as caught:
        drafter_for(target, mine, target_weights=theirs)
    assert caught.value.field == "tokenizer"


def test_another_vocabulary_is_refused_unless_the_tokenizer_is_the_same(
    target: Decoder, target_dir: Path, tmp_path: Path
) -> None:
    padded = make_toy_target(
        tmp_path / "padded", vocab_size=VOCAB + 32, hidden_size=96, num_layers=1, planted=0.0
    )
    with pytest.raises(CheckpointError, match="vocab_size is 96, but the target's is 64") as caught:
        drafter_for(target, padded)
    assert caught.value.field == "vocab_size"
    draft = copy_of(padded, tmp_path / "draft", {"a": 0})
    theirs = copy_of(target_dir, tmp_path / "target", {"a": 0})
    harness = make_harness(target, drafter_for(target, draft, target_weights=theirs))
    harness.submit([1, 2, 3], 20, request_id="a", shape=(4, 4, 16))
    harness.run()
    assert_same_tokens(
        target, [1, 2, 3], generate_plain(target, NoDrafter(), [1, 2, 3], 20), harness.sink.tokens["a"]
    )
    assert harness.sink.finished["a"].speculation.draft_tokens > 0


def test_a_token_map_restricts_what_is_drafted_and_not_what_is_said(
    target: Decoder, target_dir: Path, tmp_path: Path
) -> None:
    """FR-Spec with half of the vocabulary.

    The draft is the target itself, so it misses only the tokens that are not in the map: about half of them.
    """
    kept = list(range(0, VOCAB, 2))
    (tmp_path / "map.json").write_text(json.dumps(kept))
    drafter = drafter_for(target, target_dir, speculative_token_map=tmp_path / "map.json")
    harness = make_harness(target, drafter)
    prompt = PROMPTS[-1]
    harness.submit(prompt, LENGTH, request_id="a", shape=(3, 2, 8), trace=True)
    harness.run()
    assert_same_tokens(
        target, prompt, generate_plain(target, NoDrafter(), prompt, LENGTH), harness.sink.tokens["a"]
    )
    drafted = {node.token for one in harness.sink.rounds["a"] for node in one.nodes[1:]}
    assert drafted
    assert drafted <= set(kept)
    said = harness.sink.tokens["a"]
    accepted = harness.sink.finished["a"].speculation.accepted_tokens
    assert 0 < accepted <= sum(token in kept for token in said)
