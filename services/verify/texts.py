"""Compares the texts of two runs for the requests with stop strings, as the gateway cuts these texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from outrider.services.gateway.detokenizer import TextAssembler
from outrider.services.gateway.request import StopRules
from outrider.services.verify.pair_engine import Answers

STOP_CHARS = 3


@dataclass(frozen=True, slots=True)
class TextComparison:
    """The texts up to a stop string of a run with speculation, compared with those of the run without.

    Attributes:
        compared: Number of texts.
        stopped: Number of texts that end at their stop string.
        different: Ids of the requests whose texts differ although their tokens are equal.
    """

    compared: int
    stopped: int
    different: Sequence[str]

    @property
    def holds(self) -> bool:
        """True if no text differs."""
        return not self.different


def stop_text(tokenizer: Tokenizer, answer: Sequence[int]) -> str:
    """Return a stop string from the middle of an answer. Empty if the answer has too little text."""
    text = str(tokenizer.decode(list(answer)))
    middle = len(text) // 2
    return text[middle : middle + STOP_CHARS]


def cut_text(tokenizer: Tokenizer, parts: Sequence[Sequence[int]], stop: str) -> tuple[str, bool]:
    """Return the text of an answer up to its stop string, and whether it contains the stop string.

    Args:
        tokenizer: Tokenizer of the target.
        parts: The tokens of the answer, as they arrived.
        stop: The stop string.
    """
    assembler = TextAssembler(tokenizer, StopRules(strings=(stop,)), frozenset())
    text = "".join(assembler.push(part).text for part in parts)
    return text + assembler.finish().text, assembler.matched_stop is not None


def compare_texts(
    tokenizer: Tokenizer, stops: Mapping[str, str], off: Answers, on: Answers
) -> TextComparison:
    """Return the comparison of the texts of requests with stop strings.

    Args:
        tokenizer: Tokenizer of the target.
        stops: Request id → stop string.
        off, on: The answers without and with speculation, respectively.
    """
    different, stopped, compared = [], 0, 0
    for name, stop in stops.items():
        if off.tokens.get(name) != on.tokens.get(name):
            continue  # The comparison of the tokens judges this difference.
        compared += 1
        texts = [cut_text(tokenizer, one.parts.get(name, ()), stop) for one in (off, on)]
        stopped += texts[1][1]
        if texts[0] != texts[1]:
            different.append(name)
    return TextComparison(compared, stopped, different)
