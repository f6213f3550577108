"""Compiles the output constraints among the options of `outrider verify`, for the target's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.services.doctor.pair import Pair
from outrider.services.target.grammar.backend import GrammarBackend, compile_grammar
from outrider.services.target.grammar.matcher import Grammar
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.services.verify.cases import OPTIONS
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.nn.checkpoint.tokenizer_file import TOKENIZER_FILE


@dataclass(frozen=True, slots=True)
class CompiledForms:
    """The compiled constraints of the options of `OPTIONS` that have one.

    Attributes:
        grammars: Name of the option → its grammar.
        skipped: Name of the option → the reason why this target cannot enforce the constraint.
    """

    grammars: Mapping[str, Grammar] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)


def compile_forms(pair: Pair) -> CompiledForms:
    """Compile the constraints. An option is skipped if the target has no tokenizer or cannot enforce it."""
    config, file = pair.target_config, pair.target / TOKENIZER_FILE
    asked = {name: option.constraint for name, option in OPTIONS.items() if option.constraint is not None}
    reason = ""
    if not file.is_file():
        reason = f"the target has no {TOKENIZER_FILE}"
    elif not config.eos_token_ids:
        reason = "the target has no end-of-sequence token"
    if reason:
        return CompiledForms(skipped=dict.fromkeys(asked, reason))
    vocabulary = Vocabulary(file, config.vocab_size, tuple(sorted(config.eos_token_ids)))
    grammars: dict[str, Grammar] = {}
    skipped: dict[str, str] = {}
    for name, constraint in asked.items():
        try:
            grammars[name] = compile_grammar(constraint, vocabulary, GrammarBackend.LLGUIDANCE)
        except InvalidRequestError as error:
            skipped[name] = error.message
    return CompiledForms(grammars, skipped)
