"""The process that first compiles a constraint: ``python -m …compile_process BACKEND TOKENIZER SIZE END…``.

The arguments are the grammar library, the path of ``tokenizer.json``, the number of logits, and the tokens
that end an output. The process reads requests and writes replies, each as one line of JSON. A constraint that
needs too much memory or time ends this process instead of the target.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from outrider.services.target.grammar.backend import GrammarBackend, compile_grammar
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.line_process import limit_memory

MEMORY_BYTES = 2 << 30
"""Memory for compilations, in addition to the memory of the loaded libraries."""


def request_line(constraint: Constraint) -> bytes:
    """Return the request for a constraint."""
    return json.dumps([constraint.kind.value, constraint.source, constraint.field]).encode() + b"\n"


def error_of(line: bytes) -> str:
    """Return the error that a reply contains, or an empty text if it contains none."""
    return str(json.loads(line))


def main(arguments: list[str]) -> None:
    """Reply to requests until the input ends."""
    name, file, vocab_size, *ends = arguments
    backend = GrammarBackend(name)
    vocabulary = Vocabulary(Path(file), int(vocab_size), tuple(int(end) for end in ends))
    # Loads the libraries.
    compile_grammar(Constraint(ConstraintKind.CHOICE, '["a"]'), vocabulary, backend)
    limit_memory(MEMORY_BYTES)
    _answer("")
    for line in sys.stdin.buffer:
        kind, source, field = json.loads(line)
        try:
            compile_grammar(Constraint(ConstraintKind(kind), source, field=field), vocabulary, backend)
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
