"""Request fields that ask for hidden states and routed experts, under SGLang's names."""

from __future__ import annotations

from outrider.services.gateway.requested_states import NO_REQUESTED_STATES, RequestedStates
from outrider.services.gateway.schemas.base import OpenModel
from outrider.services.gateway.schemas.option_fields.openai import ChatAndCompletionFields
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.token_states import StateParams


class StateFields(ChatAndCompletionFields, OpenModel):
    """Fields that the routes of chats and completions share."""

    def wanted_states(self) -> RequestedStates:
        """Return the states that the client wants.

        Raises:
            InvalidRequestError: If the reply is a stream.
        """
        return requested_states(
            bool(self.return_hidden_states),
            bool(self.return_routed_experts),
            self.routed_experts_start_len or 0,
            stream=bool(getattr(self, "stream", None)),
        )


def requested_states(hidden: bool, experts: bool, experts_start: int, *, stream: bool) -> RequestedStates:
    """Return the hidden states and routed experts that a client wants.

    Args:
        hidden: Whether the client wants hidden states.
        experts: Whether the client wants routed experts.
        experts_start: Index of the first token whose routed experts the client wants.
        stream: Whether the reply is a stream.

    Raises:
        InvalidRequestError: If the reply is a stream.
    """
    if not hidden and not experts:
        return NO_REQUESTED_STATES
    if stream:
        field = "return_hidden_states" if hidden else "return_routed_experts"
        raise InvalidRequestError(
            f"{field} does not allow stream: true. Leave one of the two out, or use gRPC, which streams "
            "the states.",
            field=field,
        )
    return RequestedStates(StateParams(hidden, experts, 0 if hidden else experts_start), experts_start)
