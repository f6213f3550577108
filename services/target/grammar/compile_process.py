"""The process that first compiles a constraint: ``python -m …compile_process TOKENIZER VOCAB_SIZE END…``.

The process reads one request per line and writes one line in reply to each, both in JSON. A constraint that
needs too much memory or time ends this process instead of the target.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from outrider.services.target.grammar.guidance import Vocabulary, compile_grammar
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError

MEMORY_BYTES = 2 << 30


def request_line(constraint: Constraint) -> bytes:
    """Return the request for a constraint."""
    return json.dumps([constraint.kind.value, constraint.source, constraint.field]).encode() + b"\n"


def error_of(line: bytes) -> str:
    """Return the error that a reply contains, or an empty text if it contains none."""
    return str(json.loads(line))


def main(arguments: list[str]) -> None:
    """Reply to requests until the input ends."""
    file, vocab_size, *ends = arguments
    vocabulary = Vocabulary(Path(file), int(vocab_size), tuple(int(end) for end in ends))
    limits: Any = (MEMORY_BYTES, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    _answer("")
    for line in sys.stdin.buffer:
        kind, source, field = json.loads(line)
        try:
            compile_grammar(Constraint(ConstraintKind(kind), source, field=field), vocabulary)
        except InvalidRequestError as error:
            _answer(error.message)
        except MemoryError:
            _answer(f"{field} needs too much memory.")
        else:
            _answer("")


def _answer(error: str) -> None:
    sys.stdout.buffer.write(json.dumps(error).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
