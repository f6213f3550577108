"""Compares the texts of two runs up to a stop string or stop regex, where the gateway cuts these texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from outrider.services.gateway.detokenizer import TextAssembler
from outrider.services.gateway.request import StopRules
from outrider.services.verify.pair_engine import Answers

STOP_CHARS = 3


@dataclass(frozen=True, slots=True)
class TextComparison:
    """The texts up to a stop of a run with speculation, compared with those of the run without.

    Attributes:
        compared: Number of texts.
        stopped: Number of texts that end at their stop.
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


def stop_rules(stop: str) -> tuple[StopRules, ...]:
    """Return the rules to compare for a stop string: the string itself, and a regex that matches it."""
    return StopRules(strings=(stop,)), StopRules(regexes=(f"(?:{re.escape(stop)})",))


def cut_text(tokenizer: Tokenizer, parts: Sequence[Sequence[int]], rules: StopRules) -> tuple[str, bool]:
    """Return the text of an answer up to its stop, and whether the answer contains the stop.

    Args:
        tokenizer: Tokenizer of the target.
        parts: The tokens of the answer, as they arrived.
        rules: The stop string or stop regex.
    """
    assembler = TextAssembler(tokenizer, rules, frozenset())
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
        for rules in stop_rules(stop):
            compared += 1
            texts = [cut_text(tokenizer, one.parts.get(name, ()), rules) for one in (off, on)]
            stopped += texts[1][1]
            if texts[0] != texts[1] and name not in different:
                different.append(name)
    return TextComparison(compared, stopped, different)
