"""Parts of the chat: saved conversations, options, dropped turns, wrapped lines, trees, and URLs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.services.scripted_gateway import ROUND

from outrider.services.clients.rest import gateway_url
from outrider.services.terminal.conversation import Conversation
from outrider.services.terminal.origins import (
    BONUS_STYLE,
    DRAFT_STYLES,
    OriginColours,
    colour_legend,
    style_of,
)
from outrider.services.terminal.tree_text import round_tree
from outrider.services.terminal.wrapped import WrappedPrinter
from outrider.shared.base.errors import InvalidRequestError


def console(width: int = 12) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def printed(one: Console) -> str:
    assert isinstance(one.file, io.StringIO)
    return one.file.getvalue()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/", "http://h:1"),
        ("https://h/v1/", "https://h"),
        ("h:1/v1", "http://h:1"),
        ("http://h/prefix", "http://h/prefix"),
    ],
)
def test_a_url_may_lack_its_scheme_and_may_end_with_v1(given: str, url: str) -> None:
    assert gateway_url(given) == url


def test_a_saved_chat_is_loaded_with_its_options(tmp_path: Path) -> None:
    chat = Conversation(
        {"temperature": 0.5, "depth": 3}, "on", "Be brief.", [{"role": "user", "content": "x"}]
    )
    chat.save(tmp_path / "chat.json")
    other = Conversation()
    other.load(tmp_path / "chat.json")
    assert other.request(trace=True) == (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
        {"temperature": 0.5, "speculation": {"depth": 3, "mode": "on", "trace": True}},
    )


@pytest.mark.parametrize("text", ["", "[]", '{"format": "outrider-chat/1", "messages": [{"role": "robot"}]}'])
def test_a_file_that_is_no_chat_is_refused_and_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    chat = Conversation(system="kept")
    with pytest.raises(InvalidRequestError, match="is not a chat"):
        chat.load(tmp_path / "x.json")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        chat.load(tmp_path / "none.json")
    assert chat.system == "kept"


def test_saved_options_of_other_names_and_types_are_left_out(tmp_path: Path) -> None:
    body = {"format": "outrider-chat/1", "messages": [], "options": {"seed": 1, "top_p": "x", "model": 3}}
    (tmp_path / "x.json").write_text(json.dumps(body))
    chat = Conversation()
    chat.load(tmp_path / "x.json")
    assert chat.options == {"seed": 1}


def test_the_oldest_turn_goes_with_its_answer_and_the_newest_question_stays() -> None:
    roles = ["user", "assistant", "user", "user"]
    chat = Conversation(messages=[{"role": role, "content": str(at)} for at, role in enumerate(roles)])
    left = []
    while chat.drop_oldest_turn():
        left.append([one["content"] for one in chat.messages])
    assert left == [["2", "3"], ["3"]]


def test_words_are_wrapped_whole_even_if_they_arrive_in_pieces() -> None:
    out = console(12)
    printer = WrappedPrinter(out)
    for piece in ("one tw", "o thr", "ee four", "\n\nfi", "ve"):
        printer.add(piece, "")
    printer.finish()
    assert [line.rstrip() for line in printed(out).split("\n")] == ["one two", "three four", "", "five", ""]


def test_text_that_arrives_late_keeps_the_colour_of_its_token() -> None:
    colours = OriginColours()
    assert list(colours.pieces("The", None)) == [("The", "")]
    assert list(colours.pieces(" bl", ROUND)) == [(" bl", DRAFT_STYLES[0])]
    late = [*colours.pieces("ue sky", None)]
    assert late[:2] == [("ue", DRAFT_STYLES[0]), (" sky", BONUS_STYLE)]


def test_the_tree_shows_texts_probabilities_and_the_targets_token() -> None:
    out = console(60)
    out.print(round_tree(ROUND))
    text = printed(out)
    for part in (
        "'The'",
        "' blue'  90.5 %  accepted",
        "' red'  5.0 %  rejected",
        "' sky'  chosen by the target",
    ):
        assert part in text


def test_nodes_after_the_end_of_the_answer_are_not_called_accepted() -> None:
    texts = ["The", " sky", "<|im_end|>", "\n", "<|im_start|>"]
    chain = [
        {"token": at, "parent": at - 1, "depth": at, "logprob": -0.1, "text": text}
        for at, text in enumerate(texts)
    ]
    trace = ROUND | {
        "nodes": chain,
        "accepted": [1, 2, 3, 4],
        "emitted": [1, 2],
        "emitted_text": [" sky", "<|im_end|>"],
    }
    out = console(80)
    out.print(round_tree(trace))
    fates = [line.split(" %  ")[1].strip() for line in printed(out).splitlines()[1:]]
    assert fates == ["accepted", "accepted, ends the answer", *["after the end of the answer"] * 2]


def test_an_end_token_that_was_not_drafted_is_shown_by_its_name() -> None:
    trace = ROUND | {"emitted": [2, 7], "emitted_text": [" blue", "<|im_end|>"]}
    out = console(80)
    out.print(round_tree(trace))
    assert "'<|im_end|>'  chosen by the target" in printed(out)


def test_an_answer_that_is_cut_by_its_length_ends_at_its_last_token() -> None:
    trace = ROUND | {"emitted": [2], "emitted_text": [" blue"]}
    out = console(80)
    out.print(round_tree(trace))
    text = printed(out)
    assert "' blue'  90.5 %  accepted, ends the answer" in text
    assert "chosen by the target" not in text


def test_every_depth_up_to_16_has_a_colour_of_its_own() -> None:
    chain = [{"token": at, "parent": at - 1, "depth": at, "logprob": -0.1, "text": "x"} for at in range(17)]
    trace = ROUND | {"nodes": chain, "accepted": list(range(1, 17)), "emitted_text": ["x"] * 17}
    styles = [style_of(trace, position) for position in range(17)]
    assert len(set(styles)) == 17
    assert [str(span.style) for span in colour_legend().spans if "color" in str(span.style)] == styles
