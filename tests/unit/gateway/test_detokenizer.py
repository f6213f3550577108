"""Incremental decoding: no split code points, no retracted text, and ids aligned with their text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.toy_text import make_tokenizer
from tokenizers import Tokenizer, decoders, models

from outrider.services.gateway.detokenizer import IncrementalDecoder, TextAssembler, special_token_ids
from outrider.services.gateway.request import StopRules


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A tokenizer like SentencePiece's: it drops a leading space and encodes unknown characters as bytes."""
    words = ["<unk>", "<s>", "▁the", "▁cat", "s", "▁", "a"]
    vocab = {word: at for at, word in enumerate(words)} | {
        f"<0x{byte:02X}>": len(words) + byte for byte in range(256)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip)
    return [decoder.push(one) for one in ids] + [decoder.flush()]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_the_pieces_make_the_text_and_none_breaks_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces[-1] == "" or text.endswith("�")
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 260), max_size=40))
def test_any_ids_at_all_are_decoded_and_valid_text_comes_through(
    tokenizer: Tokenizer, byte_fallback: Tokenizer, ids: list[int]
) -> None:
    decoded = "".join(pieces_of(tokenizer, ids))
    # Broken bytes may be rendered at other places. Everything else must be present and in order.
    assert decoded.replace("�", "") == tokenizer.decode(ids).replace("�", "")
    # If one byte of a run is broken, a byte-fallback decoder drops the whole run. A stream has already
    # released the valid bytes by then, so compare without byte tokens.
    words = [token for token in ids if token < 7]
    assert "".join(pieces_of(byte_fallback, words)) == byte_fallback.decode(words)
    pieces_of(byte_fallback, ids)


def test_a_sentencepiece_text_keeps_its_inner_spaces(byte_fallback: Tokenizer) -> None:
    fox = [7 + byte for byte in "🦊".encode()]
    assert pieces_of(byte_fallback, [2, 3, 4, 5, *fox, 2]) == [
        "the",
        " cat",
        "s",
        " ",
        "",
        "",
        "",
        "🦊",
        " the",
        "",
    ]


def test_bytes_that_are_no_text_are_let_go_in_the_end(byte_fallback: Tokenizer) -> None:
    lone = 7 + 0x80
    pieces = pieces_of(byte_fallback, [3] + [lone] * 30 + [3])
    assert "�" in "".join(pieces[:12])
    assert "".join(pieces).endswith(" cat")
    assert pieces_of(byte_fallback, [3, lone])[-1] == "�"


def test_special_tokens_are_hidden_or_shown_and_do_not_break_characters(tokenizer: Tokenizer) -> None:
    fox = tokenizer.encode("🦊", add_special_tokens=False).ids
    assert "".join(pieces_of(tokenizer, [0] * 20 + fox)) == "🦊"
    assert "".join(pieces_of(tokenizer, [0, *fox, 2], skip=False)) == "<|bos|>🦊<|user|>"


def assemble(
    tokenizer: Tokenizer | None,
    ids: list[int],
    rules: StopRules,
    silent: frozenset[int] = frozenset(),
    step: int = 1,
):
    assembler = TextAssembler(tokenizer, rules, silent)
    chunks = [assembler.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    return assembler, [*chunks, assembler.finish()]


@pytest.mark.parametrize("step", [1, 2, 50])
def test_ids_are_released_with_the_last_of_their_text(tokenizer: Tokenizer, step: int) -> None:
    ids = tokenizer.encode("the dog EN and 🦊 E", add_special_tokens=False).ids
    _, chunks = assemble(tokenizer, ids, StopRules(strings=("END",)), step=step)
    text, released = "", []
    for chunk in chunks:
        text += chunk.text
        released += chunk.token_ids
        # The text of all released ids has been shown. A character that is released in part decodes to U+FFFD.
        assert text.startswith(tokenizer.decode(released).rstrip("�"))
    assert (text, released) == ("the dog EN and 🦊 E", ids)


@pytest.mark.parametrize("step", [1, 3, 50])
def test_tokens_after_a_stop_string_are_dropped(tokenizer: Tokenizer, step: int) -> None:
    ids = tokenizer.encode("one END two", add_special_tokens=False).ids
    assembler, chunks = assemble(tokenizer, ids, StopRules(strings=("END",)), step=step)
    assert "".join(chunk.text for chunk in chunks) == "one "
    released = [token for chunk in chunks for token in chunk.token_ids]
    assert released == ids[: assembler.num_tokens]
    assert "END" in tokenizer.decode(released)
    assert "END" not in tokenizer.decode(released[:-1])


def test_a_silent_token_has_no_text_but_is_told(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b", add_special_tokens=False).ids
    _, chunks = assemble(tokenizer, ids, StopRules(skip_special_tokens=False), silent=frozenset([ids[-1]]))
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(ids[:-1])
    assert [token for chunk in chunks for token in chunk.token_ids] == ids


def test_without_a_tokenizer_ids_pass_through() -> None:
    _, chunks = assemble(None, [5, 6, 7], StopRules())
    assert [(chunk.text, chunk.token_ids) for chunk in chunks] == [
        ("", [5]),
        ("", [6]),
        ("", [7]),
        ("", []),
    ]


def test_a_long_run_of_skipped_tokens_is_not_decoded_again_and_again(tmp_path: Path) -> None:
    """`DecodeStream` keeps skipped tokens and decodes all of them with each further one."""
    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path) / "tokenizer.json"))
    special = min(special_token_ids(tokenizer))
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    steps = []

    class Counting:
        def step(self, used: Tokenizer, token_id: int) -> str:
            steps.append(token_id)
            return "x"

    decoder._stream = Counting()  # type: ignore[assignment]
    assert "".join(decoder.push(special) for _ in range(5000)) == ""
    assert decoder.push(9) == "x"
    assert steps == [9]


def test_no_stop_string_ends_a_text_that_is_too_short(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two one two one", add_special_tokens=False).ids
    plain = TextAssembler(tokenizer, StopRules(strings=("two",)), frozenset())
    plain.push(ids)
    assert plain.num_tokens < len(ids), "the first match ends the text"
    early = next(at for at in range(1, len(ids) + 1) if "two" in tokenizer.decode(ids[:at]))
    patient = TextAssembler(tokenizer, StopRules(strings=("two",), min_tokens=early), frozenset())
    chunk = patient.push(ids)
    assert patient.matched_stop == "two"
    assert patient.num_tokens > early
    assert chunk.text.count("two") == 1
    assert list(chunk.token_ids) == ids[: patient.num_tokens]


@pytest.mark.parametrize("step", [1, 3, 50])
def test_a_text_ends_with_the_token_that_completes_a_stop_regex(tokenizer: Tokenizer, step: int) -> None:
    ids = tokenizer.encode("one 12 two 345 three", add_special_tokens=False).ids
    pattern = r"\d{3}|\bnever"
    rules = StopRules(strings=("three",), regexes=(pattern,))
    assembler, chunks = assemble(tokenizer, ids, rules, step=step)
    first = next(at for at in range(1, len(ids) + 1) if re.search(pattern, tokenizer.decode(ids[:at])))
    assert (assembler.matched_stop, assembler.num_tokens) == (pattern, first)
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(ids[:first])
    assert [token for chunk in chunks for token in chunk.token_ids] == ids[:first]


def test_a_stop_string_in_the_same_token_wins_over_a_stop_regex(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two", add_special_tokens=False).ids
    assembler, chunks = assemble(tokenizer, ids, StopRules(strings=("two",), regexes=("t.o",)))
    assert assembler.matched_stop == "two"
    assert "".join(chunk.text for chunk in chunks) == "one "


def test_no_stop_regex_ends_a_text_that_is_too_short(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two one two one", add_special_tokens=False).ids
    early = next(at for at in range(1, len(ids) + 1) if "two" in tokenizer.decode(ids[:at]))
    patient = TextAssembler(tokenizer, StopRules(regexes=("tw.",), min_tokens=early), frozenset())
    assert patient.push(ids).text.count("two") == 2
    assert (patient.matched_stop, patient.num_tokens > early) == ("tw.", True)
