"""Compiles constraints on outputs: first in a process with caps on time and memory, then in the target.

A constraint that the separate process could compile is harmless. The target then compiles it again, because a
compiled grammar cannot be sent from one process to another.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.services.target.grammar.backend import GrammarBackend, compile_grammar, versions_of
from outrider.services.target.grammar.compile_process import error_of, request_line
from outrider.services.target.grammar.matcher import Grammar
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.shared.base.constraint import Constraint
from outrider.shared.base.errors import InvalidRequestError, OutriderError, OverloadedError
from outrider.shared.base.line_process import LineProcess, NoReplyError
from outrider.shared.nn.checkpoint.tokenizer_file import TOKENIZER_FILE
from outrider.shared.nn.config.model_config import ModelConfig

COMPILE_S = 5.0
START_S = 60.0
KEPT_GRAMMARS = 256
MAX_STARTED = 64
MODULE = "outrider.services.target.grammar.compile_process"


class GrammarCompiler:
    """Compiles constraints on outputs, and keeps the most recent grammars. Call on one event loop only.

    Args:
        tokenizer: Path of the model's ``tokenizer.json``.
        vocab_size: Number of logits of the model.
        ends: The tokens that end an output.
        backend: The library that enforces the constraints.
        compile_s: Longest time of one compilation, in seconds.
    """

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        ends: frozenset[int],
        backend: GrammarBackend = GrammarBackend.LLGUIDANCE,
        compile_s: float = COMPILE_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = tuple(sorted(ends))
        self._backend = backend
        self._compile_s = compile_s
        self._vocabulary: Vocabulary | None = None
        self._process: LineProcess | None = None
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._started: dict[bytes, asyncio.Future[Grammar]] = {}
        # One thread suffices, because there is one compile process.
        self._thread = ThreadPoolExecutor(1, "outrider-grammar")
        self._closed = threading.Event()

    @classmethod
    def of(cls, model: Path, config: ModelConfig, backend: GrammarBackend) -> GrammarCompiler:
        """Return the compiler for a model's folder."""
        ends = frozenset(config.eos_token_ids)
        return cls(model / TOKENIZER_FILE, config.vocab_size, ends, backend)

    async def compile(self, constraint: Constraint) -> Grammar:
        """Return the compiled grammar of a constraint. Recently compiled grammars are not compiled again.

        Raises:
            InvalidRequestError: The constraint is malformed or too expensive, or this target cannot enforce
                it. The error names the client's field.
            OverloadedError: Too many constraints are being compiled.
        """
        constraint.check()
        self._check_model(constraint)
        key = f"{versions_of(self._backend)}\n{constraint.kind.value}\n{constraint.source}"
        digest = hashlib.sha256(key.encode()).digest()
        if (found := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return found
        if (started := self._started.get(digest)) is None:
            if len(self._started) >= MAX_STARTED:
                raise OverloadedError(
                    "Too many constraints are being compiled. Try again soon.", retry_after_s=1.0
                )
            loop = asyncio.get_running_loop()
            started = self._started[digest] = loop.run_in_executor(self._thread, self._compile, constraint)
            started.add_done_callback(lambda done: self._keep(digest, done))
        # A client that leaves must not end the compilation for other clients with the same constraint.
        return await asyncio.shield(started)

    def close(self) -> None:
        """End the process."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()

    def _check_model(self, constraint: Constraint) -> None:
        reason = None
        if not self._tokenizer.is_file():
            reason = f"the model's folder has no {self._tokenizer.name}"
        elif not self._ends:
            reason = "the model has no end-of-sequence token"
        if reason is not None:
            raise InvalidRequestError(
                f"{constraint.field} cannot be enforced on this server, because {reason}.",
                field=constraint.field,
                reason="unsupported_parameter",
            )

    def _keep(self, digest: bytes, done: asyncio.Future[Grammar]) -> None:
        del self._started[digest]
        if not done.cancelled() and done.exception() is None:
            self._kept[digest] = done.result()
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)

    def _compile(self, constraint: Constraint) -> Grammar:
        """Compile on the compiler's thread."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._ends)
        limit_s = START_S
        try:
            if self._process is None or self._closed.is_set():
                arguments = [self._backend.value, *map(str, (self._tokenizer, self._vocab_size, *self._ends))]
                self._process = LineProcess([sys.executable, "-m", MODULE, *arguments])
                self._process.read(START_S)
            limit_s = self._compile_s
            self._process.send(request_line(constraint))
            error = error_of(self._process.read(limit_s))
        except NoReplyError as failure:
            assert self._process is not None
            self._process.kill()
            self._process = None
            raise (_late(constraint, limit_s) if failure.late else _ended(constraint)) from None
        if error:
            raise InvalidRequestError(error, field=constraint.field)
        return compile_grammar(constraint, self._vocabulary, self._backend)


def _late(constraint: Constraint, limit_s: float) -> OutriderError:
    return InvalidRequestError(
        f"{constraint.field} takes longer than {limit_s:g} s to compile. Simplify it.", field=constraint.field
    )


def _ended(constraint: Constraint) -> OutriderError:
    return InvalidRequestError(
        f"{constraint.field} needs too much memory to compile. Simplify it.", field=constraint.field
    )
