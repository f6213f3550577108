"""Draft trees equal those of an independent EAGLE-2 / EAGLE-3 implementation, in every node and score.

Accept length and equal output do not reveal every mistake of a drafter, such as another sequence's K/V, a
shifted position, or offsets that were not fused. These tests therefore compare the trees themselves. A tree
is skipped only if two scores are so close that fp32 may order them either way. Skipped trees are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.draft_reference import PlainEagle3, PlainTree, reference_tree
from support.models.toys import make_toy_eagle3, make_toy_pair, make_toy_target, read_target_tensor
from support.suite.compute_device import DEVICE

from outrider.kernels.philox import gumbel_noise
from outrider.kernels.verify import verify_tree
from outrider.services.draft.build import build_engine
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.sessions.session import Ask, MessageVerdict, PeerId
from outrider.services.draft.settings import DraftSettings
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftBatch, DraftShape

VOCAB, HIDDEN = 48, 32
PEER = PeerId(1)
CLOSE = 2e-5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(tmp_path_factory.mktemp("pair"), 29, vocab_size=VOCAB, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> PlainEagle3:
    return PlainEagle3(pair[1], read_target_tensor(pair[0], "model.embed_tokens.weight"), torch.float64)


def make_engine(pair: tuple[Path, Path], **settings: object) -> DraftEngine:
    values = {
        "draft": pair[1],
        "target_weights": pair[0],
        "device": str(DEVICE),
        "kv_tokens": 4096,
        "page_size": 3,
        **settings,
    }
    return build_engine(DraftSettings.load(values), DEVICE, torch.float32)


def sequence(seed: int, length: int) -> tuple[list[int], torch.Tensor]:
    """Return random tokens, and features for all but the last token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist(), torch.randn(
        length - 1, HIDDEN, generator=generator
    )


def fence_of(session_id: int, tokens: Sequence[int]) -> Fence:
    return Fence(session_id, 1, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))


def follow(
    engine: DraftEngine,
    session_id: int,
    tokens: Sequence[int],
    features: torch.Tensor,
    shape: DraftShape,
    temperature: float = 0.0,
) -> None:
    """Open a session with all but the last token, send its features in two parts, commit the last token.

    Returns the tree that the engine proposes then.
    """
    prompt = tokens[:-1]
    opening = SequenceOpen(
        fence_of(session_id, prompt), prompt, seed=session_id * 7919 + (1 << 63), temperature=temperature
    )
    assert engine.open(PEER, opening).verdict is MessageVerdict.ACCEPTED
    half = len(features) // 2
    for base, rows in ((0, features[:half]), (half, features[half:-1])):
        if len(rows):
            assert engine.add_features(PEER, session_id, 1, base, rows).verdict is MessageVerdict.ACCEPTED
    commit = Commit(fence_of(session_id, tokens), len(prompt), tokens[-1:], features[-1:])
    assert engine.commit(PEER, commit, Ask(1, shape, 0.0)).verdict is MessageVerdict.ACCEPTED


def paths_of(trees: DraftBatch, row: int) -> dict[tuple[int, ...], float]:
    """Return path → cumulative own log-prob of one tree. Asserts that the tree is well-formed."""
    tokens, parents, logprobs = (
        trees.tokens[row].tolist(),
        trees.parents[row].tolist(),
        trees.logprobs[row].tolist(),
    )
    assert parents[0] == -1
    paths: list[tuple[int, ...]] = [()]
    scores = [0.0]
    for node in range(1, int(trees.num_nodes[row])):
        parent = parents[node]
        assert 0 <= parent < node
        paths.append((*paths[parent], tokens[node]))
        scores.append(scores[parent] + logprobs[node])
        assert int(trees.depths[row, node]) == len(paths[node])
        bits = {j for j in range(len(paths)) if int(trees.ancestors[row, node, j // 32]) >> (j % 32) & 1}
        assert bits == {j for j in range(len(paths)) if paths[node][: len(paths[j])] == paths[j]}
    assert len(set(paths)) == len(paths)
    return dict(zip(paths[1:], scores[1:], strict=True))


def assert_same_tree(trees: DraftBatch, row: int, expected: PlainTree) -> None:
    """Assert that two trees are equal: tokens, parents and order exactly, scores up to rounding.

    Also asserts that verification accepts the same nodes in both.
    """
    count = int(trees.num_nodes[row])
    assert trees.tokens[row, :count].tolist() == expected.tokens
    assert trees.parents[row, :count].tolist() == expected.parents
    got = paths_of(trees, row)
    assert list(got) == list(expected.scores)
    assert all(got[path] == pytest.approx(expected.scores[path], rel=1e-4, abs=2e-4) for path in got)
    for seed in range(8):
        random = Random(seed)
        follows = {
            path: random.choice([*(child[-1] for child in got if child[:-1] == path), 0])
            for path in ((), *got)
        }
        chosen = torch.zeros(1, trees.tokens.shape[1], dtype=torch.int64)
        chosen[0, :count] = torch.tensor(list(follows.values()))
        one = slice(row, row + 1)
        verified = verify_tree(
            trees.tokens[one], trees.parents[one], trees.num_nodes[one], chosen.to(trees.tokens.device)
        )
        accepted = expected.accepted(lambda path, follows=follows: follows[path])  # type: ignore[misc]
        assert verified.path[0, : 1 + int(verified.num_accepted)].tolist() == [0, *accepted]


@pytest.mark.parametrize(
    ("steps", "topk", "nodes"),
    [
        (1, 1, 2),
        (3, 1, 4),
        (4, 1, 5),
        (1, 5, 6),
        (2, 3, 8),
        (4, 3, 12),
        (5, 4, 16),
        (5, 8, 32),
        (6, 8, 60),
        (5, 2, 60),
        (4, 16, 20),
    ],
)
def test_trees_equal_an_independent_implementation(
    pair: tuple[Path, Path], plain: PlainEagle3, steps: int, topk: int, nodes: int
) -> None:
    engine = make_engine(pair)
    cases = {session: sequence(100 * steps + topk + session, 2 + 5 * session) for session in range(4)}
    for session, (tokens, features) in cases.items():
        follow(engine, session, tokens, features, DraftShape(steps, topk, nodes))
    (proposal,) = engine.step().proposals
    assert [origin.fence.session_id for origin in proposal.origins] == list(cases)
    compared = 0
    for row, (tokens, features) in enumerate(cases.values()):
        expected = reference_tree(plain, tokens, features.double(), steps, topk, nodes)
        if expected.margin < CLOSE:
            continue
        compared += 1
        assert_same_tree(proposal.trees, row, expected)
    assert compared >= 2
    engine.drop_peer(PEER)
    engine.check()


@pytest.mark.parametrize(("steps", "topk", "nodes"), [(3, 1, 4), (5, 4, 16), (6, 8, 60)])
def test_equal_scores_are_ordered_by_index(
    pair: tuple[Path, Path], tmp_path: Path, steps: int, topk: int, nodes: int
) -> None:
    """A head that gives all tokens of a level the same score."""
    folder = tmp_path / "head"
    folder.mkdir()
    weights = load_file(str(pair[1] / "model.safetensors"))
    weights["lm_head.weight"].zero_()
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text((pair[1] / "config.json").read_text())
    tokens, features = sequence(1, 7)
    engine = make_engine((pair[0], folder))
    follow(engine, 1, tokens, features, DraftShape(steps, topk, nodes))
    (proposal,) = engine.step().proposals
    plain = PlainEagle3(folder, read_target_tensor(pair[0], "model.embed_tokens.weight"), torch.float64)
    expected = reference_tree(plain, tokens, features.double(), steps, topk, nodes)
    assert expected.margin == 0 or topk == 1
    assert_same_tree(proposal.trees, 0, expected)


def test_shapes_may_differ_within_a_batch(pair: tuple[Path, Path]) -> None:
    engine = make_engine(pair)
    shapes = [
        DraftShape(3, 2, 5),
        DraftShape(3, 2, 7),
        DraftShape(4, 1, 5),
        DraftShape(5, 4, 16),
        DraftShape(2, 2, 1),
        DraftShape(0, 1, 1),
    ]
    for session, shape in enumerate(shapes):
        follow(engine, session, *sequence(session, 9), shape)
    together = {
        origin.fence.session_id: paths_of(p.trees, row)
        for p in engine.step().proposals
        for row, origin in enumerate(p.origins)
    }
    for session, shape in enumerate(shapes):
        alone = make_engine(pair)
        follow(alone, session, *sequence(session, 9), shape)
        (proposal,) = alone.step().proposals
        assert together[session].keys() == paths_of(proposal.trees, 0).keys()
        assert len(together[session]) == shape.max_nodes - 1


def test_every_row_sees_its_own_path_whatever_its_neighbours_are(
    pair: tuple[Path, Path], plain: PlainEagle3
) -> None:
    """Use topk 5, depth 6 and batch 3, and compare the cumulative log-prob of every kept node.

    The reference is a sequential pass over the node's own path.
    """
    engine = make_engine(pair)
    cases = [sequence(300 + session, 6 + session) for session in range(3)]
    for session, (tokens, features) in enumerate(cases):
        follow(engine, session, tokens, features, DraftShape(6, 5, 128))
    (proposal,) = engine.step().proposals
    for row, (tokens, features) in enumerate(cases):
        got = paths_of(proposal.trees, row)
        assert max(len(path) for path in got) == 6
        stable = [(tokens[t + 1], features[t].double(), t) for t in range(len(tokens) - 1)]
        ids = [plain.target_id(draft_id) for draft_id in range(29)]
        states = {(): plain.last_state(stable)}
        for path, score in got.items():
            for stop in range(1, len(path)):
                if path[:stop] not in states:
                    rows = [
                        (token, states[path[:i]], len(tokens) - 1 + i) for i, token in enumerate(path[:stop])
                    ]
                    states[path[:stop]] = plain.last_state([*stable, *rows])
            total = sum(
                float(plain.logprobs(states[path[:i]])[ids.index(token)]) for i, token in enumerate(path)
            )
            assert abs(total - score) < 1e-4, path


def test_accepted_rows_are_extended_with_true_features_and_scratch_rows_leave_no_trace(
    pair: tuple[Path, Path],
) -> None:
    """After rounds of partly accepted drafts, the tree equals that of a session that never drafted."""
    tokens, features = sequence(5, 40)
    shape = DraftShape(5, 4, 16)
    engine = make_engine(pair)
    length = 11
    follow(engine, 1, tokens[:length], features[: length - 1], shape)
    step = 1
    while length < 40:
        (proposal,) = engine.step().proposals
        stop = min(40, length + step)
        commit = Commit(
            fence_of(1, tokens[:stop]), length, tokens[length:stop], features[length - 1 : stop - 1]
        )
        assert engine.commit(PEER, commit, Ask(step, shape, 0.0)).verdict is MessageVerdict.ACCEPTED
        length, step = stop, step + 1
    (proposal,) = engine.step().proposals
    fresh = make_engine(pair)
    follow(fresh, 1, tokens, features, shape)
    (expected,) = fresh.step().proposals
    got, wanted = paths_of(proposal.trees, 0), paths_of(expected.trees, 0)
    assert got.keys() == wanted.keys()
    assert max(abs(got[path] - wanted[path]) for path in got) < 1e-4


@pytest.mark.parametrize("topk", [1, 3])
def test_children_are_picked_with_the_noise_of_the_target(
    pair: tuple[Path, Path], plain: PlainEagle3, topk: int
) -> None:
    temperature = 0.8
    engine = make_engine(pair)
    ids = torch.tensor([plain.target_id(draft_id) for draft_id in range(29)])
    compared = 0
    for session in range(4):
        tokens, features = sequence(40 + session, 12)
        follow(engine, session, tokens, features, DraftShape(4, topk, 4 * topk), temperature)
        seed = torch.tensor([session * 7919 + (1 << 63) - (1 << 64)])

        def perturb(values: torch.Tensor, index: int, seed: torch.Tensor = seed) -> torch.Tensor:
            noise = gumbel_noise(seed, torch.tensor([index]), torch.zeros(1, dtype=torch.int32), ids)[0]
            return torch.log_softmax(values / temperature + noise.double(), 0)

        expected = reference_tree(plain, tokens, features.double(), 4, topk, 4 * topk, perturb)
        (proposal,) = engine.step().proposals
        if expected.margin > CLOSE:
            compared += 1
            assert list(paths_of(proposal.trees, 0)) == list(expected.scores)
    assert compared >= 2


def test_a_mixed_batch_couples_the_sampled_rows_only(pair: tuple[Path, Path]) -> None:
    cases = {1: 0.0, 2: 1.0, 3: 0.0}
    engine = make_engine(pair)
    for session, temperature in cases.items():
        follow(engine, session, *sequence(8, 10), DraftShape(4, 3, 10), temperature)
    (proposal,) = engine.step().proposals
    trees = {
        origin.fence.session_id: paths_of(proposal.trees, row).keys()
        for row, origin in enumerate(proposal.origins)
    }
    assert trees[1] == trees[3] != trees[2]


def test_prompts_beyond_the_context_table_draft_as_any_other(
    pair: tuple[Path, Path], plain: PlainEagle3
) -> None:
    tokens, features = sequence(77, 300)  # max_position_embeddings of the head is 128
    engine = make_engine(pair)
    follow(engine, 1, tokens, features, DraftShape(3, 2, 6))
    (proposal,) = engine.step().proposals
    expected = reference_tree(plain, tokens, features.double(), 3, 2, 6)
    assert expected.margin > CLOSE, "choose another seed"
    assert_same_tree(proposal.trees, 0, expected)


def test_vocabularies_smaller_than_topk_work(tmp_path: Path) -> None:
    target = make_toy_target(tmp_path / "target", vocab_size=5, hidden_size=16)
    head = make_toy_eagle3(tmp_path / "head", target, draft_vocab_size=5)
    engine = make_engine((target, head))
    generator = torch.Generator().manual_seed(1)
    follow(engine, 1, [0, 1, 2, 3], torch.randn(3, 16, generator=generator), DraftShape(3, 8, 30))
    (proposal,) = engine.step().proposals
    assert len(paths_of(proposal.trees, 0)) == 29
    assert {path[0] for path in paths_of(proposal.trees, 0)} == {0, 1, 2, 3, 4}


def test_the_max_nodes_of_a_row_bounds_its_tree(pair: tuple[Path, Path]) -> None:
    engine = make_engine(pair)
    shapes = [DraftShape(4, 3, nodes) for nodes in (2, 9, 30)]
    for session, shape in enumerate(shapes):
        follow(engine, session, *sequence(session, 5), replace(shape))
    (proposal,) = engine.step().proposals
    assert proposal.trees.num_nodes.tolist() == [2, 9, 30]
