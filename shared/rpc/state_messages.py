"""Converts the states of tokens (`shared.base.token_states`) to and from protobuf."""

from __future__ import annotations

from outrider.common.v1 import common_pb2
from outrider.shared.base.token_states import StateParams, TokenStates


def state_params_from_proto(options: common_pb2.StateOptions) -> StateParams:
    """Return the states that a request asks for."""
    return StateParams(options.hidden_states, options.routed_experts, options.start)


def state_params_to_proto(wanted: StateParams) -> common_pb2.StateOptions | None:
    """Return the message that requests these states, or None if no states are wanted."""
    if not wanted.wanted:
        return None
    return common_pb2.StateOptions(
        hidden_states=wanted.hidden_states, routed_experts=wanted.routed_experts, start=wanted.start
    )


def states_to_proto(states: TokenStates | None) -> common_pb2.TokenStates | None:
    """Return the message of some states. None stays None."""
    if states is None:
        return None
    return common_pb2.TokenStates(
        first=states.first,
        count=states.count,
        hidden_states=states.hidden_states,
        routed_experts=states.routed_experts,
    )


def states_from_proto(message: common_pb2.TokenStates) -> TokenStates:
    """Return the states in a message."""
    return TokenStates(message.first, message.count, message.hidden_states, message.routed_experts)
