"""Conversations from GSM8K (Cobbe et al., 2021; MIT licence).

The user provides the file, which is not part of this repository.
"""

import json
import re
from pathlib import Path

from outrider.train.corpus.base import Turn

_CALCULATOR = re.compile(r"<<[^>]*>>")


def load(path: Path) -> list[Turn]:
    """Read a GSM8K jsonl file as (question, solution) turns.

    Calculator annotations such as ``<<48/2=24>>`` are dropped, and ``#### 72`` becomes a sentence.

    Raises:
        ValueError: A line lacks ``question`` or ``answer``.
    """
    turns = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = json.loads(line)
        if "question" not in record or "answer" not in record:
            raise ValueError(
                f"{path}:{number}: the keys 'question' and 'answer' are missing; "
                "pass GSM8K's train.jsonl or test.jsonl"
            )
        solution, _, final = _CALCULATOR.sub("", record["answer"]).partition("####")
        turns.append(
            (" ".join(record["question"].split()), f"{solution.strip()}\nThe answer is {final.strip()}.")
        )
    return turns
