"""Selects the library that enforces a constraint."""

from __future__ import annotations

from enum import Enum
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

from outrider.services.target.grammar import guidance
from outrider.services.target.grammar.matcher import Grammar
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import ConfigurationError, InvalidRequestError


class GrammarBackend(Enum):
    """The library that enforces constraints on outputs: xgrammar or llguidance.

    AUTO uses xgrammar for the JSON schemas and lists of choices that xgrammar enforces exactly. It uses
    llguidance for all other constraints. Grammars that clients write always use llguidance, because
    llguidance limits the time per token.
    """

    LLGUIDANCE = "llguidance"
    XGRAMMAR = "xgrammar"
    AUTO = "auto"

    @property
    def uses_xgrammar(self) -> bool:
        """Return True if xgrammar must be installed."""
        return self is not GrammarBackend.LLGUIDANCE

    def check_installed(self) -> None:
        """Check that the library is installed.

        Raises:
            ConfigurationError: xgrammar is missing.
        """
        if self.uses_xgrammar and find_spec("xgrammar") is None:
            raise ConfigurationError(
                "grammar_backend: xgrammar is not installed; run pip install 'outrider[xgrammar]'.",
                field="grammar_backend",
            )


def compile_grammar(constraint: Constraint, vocabulary: Vocabulary, backend: GrammarBackend) -> Grammar:
    """Compile a constraint.

    Raises:
        InvalidRequestError: The constraint is malformed, or the backend cannot enforce it exactly.
    """
    own = constraint.kind in (ConstraintKind.REGEX, ConstraintKind.GRAMMAR)
    if backend is GrammarBackend.XGRAMMAR or (backend is GrammarBackend.AUTO and not own):
        # Not at the top, because the library is optional, and takes seconds to load.
        from outrider.services.target.grammar import xgrammar

        try:
            return xgrammar.compile_xgrammar(constraint, vocabulary)
        except InvalidRequestError:
            if backend is GrammarBackend.XGRAMMAR:
                raise
    return guidance.compile_guidance(constraint, vocabulary)


@cache
def versions_of(backend: GrammarBackend) -> str:
    """Return a backend's name with the versions of its libraries, for the keys of cached grammars."""
    libraries = ("llguidance", "xgrammar") if backend.uses_xgrammar else ("llguidance",)
    return " ".join([backend.value, *(f"{name}-{version(name)}" for name in libraries)])
