"""Checks the speculation options of a request against the limits of the target."""

from __future__ import annotations

from outrider.services.gateway.request import RequestedSpeculation
from outrider.services.gateway.served_target import ServedTarget
from outrider.shared.base.errors import InvalidRequestError

DEFAULT_MAX_STEPS, DEFAULT_MAX_TOPK, DEFAULT_MAX_NODES = 16, 16, 128


def check_speculation(asked: RequestedSpeculation, name: str, info: ServedTarget) -> None:
    """Check the shape of draft trees that a request asks for.

    Args:
        asked: The speculation options of the request.
        name: Name of the field that contains the options.
        info: The target's limits.

    Raises:
        InvalidRequestError: If a number is below 1 or above the target's limit.
    """
    caps = (
        ("depth", asked.depth, info.max_steps or DEFAULT_MAX_STEPS),
        ("topk", asked.topk, info.max_topk or DEFAULT_MAX_TOPK),
        ("max_nodes", asked.max_nodes, info.max_nodes or DEFAULT_MAX_NODES),
    )
    for option, value, cap in caps:
        if value is not None and not 1 <= value <= cap:
            counts_root = option == "max_nodes" and value < 1
            hint = " It counts the root: 1 means no draft nodes." if counts_root else ""
            field = f"{name}.{option}"
            raise InvalidRequestError(
                f"{field} must be between 1 and {cap} on this server, not {value}.{hint}", field=field
            )
