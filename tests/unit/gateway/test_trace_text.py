"""Texts of traced rounds: nodes behind their parents, split characters, silent tokens, and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.models.toy_text import make_tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel

from outrider.services.gateway.request import StopRules
from outrider.services.gateway.trace_text import TraceTexts
from outrider.shared.base.generation import RoundTrace, TraceNode


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def chain(tokens: Sequence[int], emitted: Sequence[int]) -> RoundTrace:
    """Return a round whose tree is a chain of `tokens`; the first is the root."""
    nodes = [TraceNode(token, at - 1, at, -0.5) for at, token in enumerate(tokens)]
    return RoundTrace(0, 1, nodes, range(1, len(tokens)), emitted, 1.0, 1.0)


def texts_of(tokenizer: Tokenizer, prompt: Sequence[int], silent: frozenset[int] = frozenset()) -> TraceTexts:
    return TraceTexts(tokenizer, prompt, StopRules(), silent)


def test_nodes_and_emitted_tokens_spell_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False).ids
    texts = texts_of(tokenizer, [ids[0]])
    first = texts.emit(ids[1:3])
    described = texts.describe(chain(ids[2:-1], ids[3:]), ids[3:])
    whole = tokenizer.decode(ids[:1]) + "".join([*first, *described.emitted_text])
    assert whole == "one two three"
    assert "".join(str(node.text) for node in described.nodes) == tokenizer.decode(ids[2:-1])


def test_siblings_share_the_text_before_them(tokenizer: Tokenizer) -> None:
    first, left, right = tokenizer.encode("abc", add_special_tokens=False).ids[:3]
    nodes = [TraceNode(first, -1, 0, 0.0), TraceNode(left, 0, 1, -1.0), TraceNode(right, 0, 1, -2.0)]
    described = texts_of(tokenizer, [first]).describe(RoundTrace(0, 1, nodes, (), (left,), 1.0, 1.0), [left])
    expected = [tokenizer.decode([token]) for token in (first, left, right)]
    assert [node.text for node in described.nodes] == expected


def test_a_split_character_belongs_to_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦊", add_special_tokens=False).ids
    assert len(ids) > 1
    described = texts_of(tokenizer, [7]).describe(chain([7, *ids], ids), ids)
    assert list(described.emitted_text) == [""] * (len(ids) - 1) + ["🦊"]
    assert described.nodes[-1].text == "🦊"
    assert set(described.nodes[1].text or "") == {"\N{REPLACEMENT CHARACTER}"}


def test_a_leading_space_is_part_of_the_node() -> None:
    words = Tokenizer(WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    words.decoder = Metaspace()
    texts = texts_of(words, [0, 1])
    described = texts.describe(chain([1, 0], [0]), [0])
    assert [node.text for node in described.nodes] == [" b", " a"]


def test_a_token_that_ends_the_sequence_has_the_text_of_its_node_and_cut_tokens_are_left_out(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False).ids
    texts = texts_of(tokenizer, ids[:1], frozenset({ids[1]}))
    described = texts.describe(chain(ids, [ids[1], ids[0]]), [ids[1]])
    assert described.emitted_text == (described.nodes[1].text,) == (tokenizer.decode(ids[1:2]),)


def test_an_end_token_has_the_same_text_whether_it_was_drafted_or_not() -> None:
    words = Tokenizer(WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    words.decoder = Metaspace()
    words.add_special_tokens(["<|end|>"])
    end = words.token_to_id("<|end|>")
    assert end is not None
    drafted = texts_of(words, [0, 1], frozenset({end})).describe(chain([1, end], [end]), [end])
    bonus = texts_of(words, [0, 1], frozenset({end})).describe(chain([1, 0], [0, end]), [0, end])
    plain = texts_of(words, [0, 1], frozenset({end})).describe(chain([1], [end]), [end])
    assert drafted.nodes[1].text == drafted.emitted_text[0]
    assert [one.emitted_text[-1].strip() for one in (drafted, bonus, plain)] == ["<|end|>"] * 3
