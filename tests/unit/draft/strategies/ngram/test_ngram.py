"""N-gram drafting: matching, the trie of continuations, and corpus files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.services.draft.sessions.session import Ask, PeerId
from outrider.services.draft.sessions.session_table import SessionLimits, SessionTable
from outrider.services.draft.strategies.ngram.corpus import Corpus
from outrider.services.draft.strategies.ngram.match import ContinuationTrie, TokenHistory, find_matches
from outrider.services.draft.strategies.ngram.strategy import NgramOptions, NgramStrategy
from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape
from outrider.shared.spec.trees import HostTree, pad_trees

PEER = PeerId(1)


def text(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, dtype=np.int32)


def paths(tree: HostTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


def test_longer_matches_come_first_and_of_equal_ones_the_latest() -> None:
    matches = find_matches(text(7, 1, 2, 3, 9, 2, 3, 8, 2, 3, 5, 1, 2, 3), 1, 12)
    assert [(match.end, match.length) for match in matches] == [(3, 3), (9, 2), (6, 2)]
    assert list(matches[0].continuation(3)) == [9, 2, 3]
    assert matches[0].weight > matches[1].weight > matches[2].weight


@pytest.mark.parametrize(("minimum", "maximum", "lengths"), [(1, 2, [2, 2, 2]), (3, 12, [3]), (4, 12, [])])
def test_the_length_of_a_match_is_bounded(minimum: int, maximum: int, lengths: list[int]) -> None:
    found = find_matches(text(7, 1, 2, 3, 9, 2, 3, 8, 2, 3, 5, 1, 2, 3), minimum, maximum)
    assert [match.length for match in found] == lengths


def test_a_continuation_that_reaches_the_end_runs_into_itself() -> None:
    (latest, *_) = find_matches(text(4, 5, 6, 4, 5, 6), 1, 12)
    assert list(latest.continuation(7)) == [4, 5, 6, 4, 5, 6, 4]


def test_nothing_to_find_is_an_empty_tree() -> None:
    for tokens in ((), (1,), (1, 2, 3)):
        assert find_matches(text(*tokens), 1, 12) == []
    assert ContinuationTrie([], 5).tree(3, DraftShape(5, 4, 16)).tokens == [3]


def test_equal_beginnings_are_merged_and_the_frequent_branch_is_heavier() -> None:
    # Token 1 is followed by 2 3 twice, by 2 4 once, and by 9 once.
    matches = find_matches(text(1, 2, 3, 0, 1, 2, 4, 0, 1, 9, 9, 0, 1, 2, 3, 5, 1), 1, 1)
    trie = ContinuationTrie(matches, 2)
    tree = trie.tree(1, DraftShape(2, 4, 16))
    assert sorted(paths(tree)) == [(2,), (2, 3), (2, 4), (9,), (9, 9)]
    assert paths(trie.tree(1, DraftShape(2, 4, 3))) == [(2,), (2, 3)]
    assert paths(trie.tree(1, DraftShape(2, 1, 16))) == [(2,), (2, 3)], "topk 1 is a chain"
    assert all(logprob <= 0 for logprob in tree.logprobs)


def test_trees_keep_to_the_shape_and_put_parents_first() -> None:
    generator = np.random.default_rng(0)
    history = generator.integers(0, 6, 400).astype(np.int32)
    trie = ContinuationTrie(find_matches(history, 1, 4), 6)
    for shape in (DraftShape(6, 2, 40), DraftShape(1, 6, 7), DraftShape(3, 3, 9), DraftShape(6, 4, 1)):
        tree = trie.tree(int(history[-1]), shape)
        assert len(tree.tokens) <= shape.max_nodes
        assert max(tree.depths) <= shape.depth
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert len(set(paths(tree))) == len(tree.tokens) - 1
        assert max((tree.parents.count(node) for node in range(len(tree.tokens))), default=0) <= shape.topk
        batch = pad_trees([tree, HostTree.of_root(3)], torch.device("cpu"))
        assert batch.num_nodes.tolist() == [len(tree.tokens), 1]
        for node in range(len(tree.tokens)):
            seen = {
                bit
                for bit in range(len(tree.tokens))
                if int(batch.ancestors[0, node, bit // 32]) >> (bit % 32) & 1
            }
            ancestors, at = set(), node
            while at >= 0:
                ancestors.add(at)
                at = tree.parents[at]
            assert seen == ancestors


def test_history_grows() -> None:
    history = TokenHistory()
    for start in range(0, 1000, 7):
        history.extend(list(range(start, start + 7)))
    assert history.tokens.tolist() == list(range(1001))


def strategy(corpus: Corpus | None = None, vocab_size: int | None = 100) -> NgramStrategy:
    return NgramStrategy(NgramOptions(), vocab_size, corpus, torch.device("cpu"))


def test_a_reopened_session_starts_from_its_new_prefix() -> None:
    drafter = strategy()
    table = SessionTable(
        SessionLimits(3, 100, 100, 0, DraftShape(8, 8, 64), row_source=drafter.info.row_source),
        drafter.release,
    )
    for epoch, tokens, expected in ((1, [1, 2, 3, 1], 2), (2, [1, 7, 3, 1], 7)):
        fence = Fence(5, epoch, 4, extend_prefix_hash(FNV_OFFSET, tokens))
        table.open(PEER, SequenceOpen(fence, tokens, 0, 0.0), 0.0)
        table.commit(PEER, Commit(fence, 4, (), None), Ask(1, DraftShape(2, 1, 3), 0.0), 0.0)
        trees = drafter.propose(table.ready())
        assert int(trees.tokens[0, 1]) == expected
        table.check()
    table.close(PEER, 5)
    assert drafter._histories == {}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.jsonl", "[1, 2, 3]\n[4, 5, 6, 7]\n"),
        ("c.json", "[[1, 2, 3], [4, 5, 6, 7]]"),
    ],
)
def test_a_corpus_is_read_and_documents_do_not_run_into_each_other(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    corpus = Corpus.read(tmp_path / name, None)
    assert [list(match.continuation(5)) for match in corpus.find(text(9, 4, 5), 1, 12)] == [[6, 7]]
    assert [list(match.continuation(5)) for match in corpus.find(text(2, 3), 1, 12)] == [[]]
    assert corpus.find(text(3, 4), 1, 12) == []
    assert corpus.find(text(4), 1, 12) == []


def test_a_corpus_of_texts_is_encoded_by_the_targets_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"a": 0, "b": 1, "c": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "c.txt").write_text("a b c\n\nb c a\n")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "a b c"}) + "\n" + json.dumps("b c a") + "\n")
    for name in ("c.txt", "c.jsonl"):
        assert Corpus.read(tmp_path / name, tmp_path).tokens.tolist() == [0, 1, 2, -1, 1, 2, 0, -1]
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        Corpus.read(tmp_path / "c.txt", None)


@pytest.mark.parametrize(
    ("name", "content"), [("c.json", "{"), ("c.json", '{"a": 1}'), ("c.jsonl", "[1, -2]"), ("c.jsonl", "17")]
)
def test_a_bad_corpus_is_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        Corpus.read(tmp_path / name, None)
    assert caught.value.field == "ngram_corpus"
    with pytest.raises(ConfigurationError):
        Corpus.read(tmp_path / "absent.json", None)


def test_a_corpus_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(CheckpointError, match="token 200"):
        strategy(Corpus([[1, 200]]))
