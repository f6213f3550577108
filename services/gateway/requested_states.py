"""Hidden states and routed experts that a client requests, and the checks of these requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.services.gateway.request import GenerationRequest
from outrider.services.gateway.served_target import ServedTarget
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.token_states import NO_STATES, StateParams

NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class RequestedStates:
    """The hidden states and routed experts of tokens that a client wants.

    Attributes:
        wanted: The states that the target reports.
        experts_start: Index of the first token whose routed experts the reply contains.
    """

    wanted: StateParams = NO_STATES
    experts_start: int = 0


NO_REQUESTED_STATES = RequestedStates()


def check_states(
    requests: Sequence[GenerationRequest], info: ServedTarget, most_bytes: int, prefix: str
) -> None:
    """Check that the target can report the hidden states or routed experts that a client wants.

    Also check that the reply does not become too large.

    Args:
        requests: The checked requests for the sequences of one client request.
        info: The target's abilities and sizes.
        most_bytes: Largest size of the states of all tokens, in bytes.
        prefix: Prefix of field names in the client's API. It is ``options.`` in gRPC.

    Raises:
        InvalidRequestError: The target cannot report the states, or the reply would be too large. The error
            names the field.
    """
    total = 0
    for request in requests:
        wanted = request.states
        if not wanted.wanted and not request.logprobs.token_ids:
            continue
        field = _field(request, prefix)
        if not info.reports_states:
            raise InvalidRequestError(f"{field} needs a newer target.", field=field)
        for token in request.logprobs.token_ids:
            if not 0 <= token < info.vocab_size:
                raise InvalidRequestError(
                    f"{field} contains the token {token}, but the vocabulary has {info.vocab_size} entries.",
                    field=field,
                )
        if wanted.routed_experts and not info.routed_layers:
            raise InvalidRequestError(
                f"{field} needs a model with routed experts, and this model has none that can be reported.",
                field=field,
                reason="unsupported_parameter",
            )
        if wanted.start > len(request.prompt_ids):
            raise InvalidRequestError(
                f"The states must start at token {len(request.prompt_ids)} or before, because the prompt has "
                f"{len(request.prompt_ids)} tokens. {field} starts at {wanted.start}.",
                field=field,
            )
        numbers = info.hidden_size if wanted.hidden_states else 0
        numbers += info.routed_layers * info.experts_per_token if wanted.routed_experts else 0
        # The last token of an answer is never the input of a pass, so it has no states.
        tokens = len(request.prompt_ids) + request.max_new_tokens - 1 - wanted.start
        total += max(0, tokens) * numbers * NUMBER_BYTES
        if total > most_bytes:
            raise InvalidRequestError(
                f"{field}: the reply may have more than {most_bytes} bytes of states, the limit of this "
                f"server (--max-state-bytes). One token has {numbers * NUMBER_BYTES} bytes. Shorten the "
                "prompt or lower the limit of new tokens.",
                field=field,
            )


def _field(request: GenerationRequest, prefix: str) -> str:
    """Return the client's name of the field that asks for the data."""
    if prefix == "options.":
        return "options.states" if request.states.wanted else "options.logprobs.token_ids"
    if not request.states.wanted:
        return "token_ids_logprob"
    return "return_hidden_states" if request.states.hidden_states else "return_routed_experts"
