"""Commits the tokens that a prefill or a round has chosen, and emits them to the client."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.services.target.engine.output_processor import OutputProcessor
from outrider.services.target.model.outcome import FAILED_TOKEN, Outcome
from outrider.services.target.scheduling.sequence import Advance, Sequence
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError
from outrider.shared.base.generation import RoundTrace
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates


class Committer:
    """Appends the tokens of finished passes to their sequences, then emits the tokens. Engine thread only.

    Args:
        output: Collects events for the clients, and ends sequences.
        poisoned: Function that fails a sequence. Called with each sequence whose logits are NaN or infinite.
        forget: Called with every sequence that has ended.
    """

    def __init__(
        self,
        output: OutputProcessor,
        poisoned: Callable[[Sequence], None],
        forget: Callable[[Sequence], None],
    ) -> None:
        self._output = output
        self._poisoned = poisoned
        self._forget = forget

    def accept(self, sequence: Sequence, emitted: Seq[int]) -> Advance | None:
        """Append chosen tokens. If the sequence's logits are invalid, fail the sequence and return None."""
        if emitted[-1] == FAILED_TOKEN:
            self._poisoned(sequence)
            return None
        return sequence.advance(list(emitted))

    def emit(
        self,
        sequence: Sequence,
        step: Advance,
        trace: RoundTrace | None = None,
        logprobs: Seq[TokenLogprob] = (),
        states: TokenStates | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """Pass accepted tokens to the client, and end the sequence if it is complete."""
        if self._output.tokens(sequence, step, trace, logprobs, self._new(sequence, states), outcome):
            self._forget(sequence)

    def emit_prompt(self, sequence: Sequence, logprobs: Seq[TokenLogprob]) -> None:
        """Pass the logprobs of the next prompt tokens to the client."""
        self._output.prompt_logprobs(sequence, logprobs)

    def emit_states(self, sequence: Sequence, states: TokenStates) -> None:
        """Pass the states of those tokens to the client whose states it wants and has not received."""
        new = self._new(sequence, states)
        if new is not None:
            self._output.states(sequence, new)

    @staticmethod
    def _new(sequence: Sequence, states: TokenStates | None) -> TokenStates | None:
        """Return the states that the client has not received, and count them as received."""
        new = None if states is None else states.between(sequence.states_len, states.stop)
        if new is not None:
            sequence.states_len = new.stop
        return new


def no_token_error(sequence: Sequence) -> OutriderError:
    """Return the error of a sequence for which no token could be chosen."""
    rules = sequence.request.sampling.rules
    waits = sequence.committed_len - sequence.prompt_len < rules.min_tokens
    given = {
        "min_tokens": waits,
        "bad_words": bool(rules.bad_words),
        "allowed_token_ids": rules.allowed_token_ids is not None,
    }
    names = [name for name, forbids in given.items() if forbids]
    forbid = f"{_listed(names)} forbid{'s' if len(names) == 1 else ''} every token"
    if sequence.form is not None:
        constraint = sequence.request.constraint
        field = "constraint" if constraint is None else constraint.field
        if names:
            why = (
                f"{forbid} that {field} allows here. If {field} requires a certain text here, it allows only "
                "one way to divide this text into tokens"
            )
        else:
            why = f"{field} allows no further token here, or is too expensive to enforce"
        message = f"No token is left to choose: {why}. Other requests are not affected."
        return InvalidRequestError(message, field=field)
    if names:
        message = (
            f"No token is left to choose: {forbid} whose logit is finite. Other requests are not affected."
        )
        return InvalidRequestError(message, field=names[-1])
    message = "The model computed NaN or infinity for this request. Other requests are not affected."
    return OutriderError(message, code=ErrorCode.INTERNAL, reason="numerical_error")


def _listed(names: Seq[str]) -> str:
    """Return the names as text, such as ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
