"""Compares the hidden states of two runs, up to the first token at which their answers differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.services.target.request import EngineRequest
from outrider.services.verify.compare import NEAR_TIE
from outrider.services.verify.logprobs import common_length
from outrider.services.verify.pair_engine import Answers
from outrider.shared.base.token_states import TokenStates, join_states

LEAST_TOLERANCE = 1e-3
ROUNDINGS = 16
"""Largest relative change of a token's hidden states that rounding explains, as a multiple of `NEAR_TIE`.

The change is relative to the norm of the hidden states. Hidden states of different tokens differ by about 1.
"""

MOST_REROUTED = {torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest share of tokens whose experts may differ. If two experts score almost equally, rounding decides."""


@dataclass(frozen=True, slots=True)
class StateComparison:
    """The hidden states of a run with speculation, compared with those of the run without speculation.

    Attributes:
        compared: Number of tokens whose states were compared.
        missing: Number of tokens whose states only one of the runs has.
        largest: Largest norm of a difference, relative to the norm of the hidden states.
        request: Id of the request with the largest difference. Empty if nothing differs.
        tolerance: Largest relative difference that rounding explains.
        routed, rerouted: Number of tokens whose routed experts were compared, and of those that differ.
        most_rerouted: Largest share of differing tokens that rounding explains.
    """

    compared: int
    missing: int
    largest: float
    request: str
    tolerance: float
    routed: int = 0
    rerouted: int = 0
    most_rerouted: float = 0.0

    @property
    def holds(self) -> bool:
        """True if no states are missing, and rounding explains every difference."""
        same_routes = self.rerouted <= self.most_rerouted * self.routed
        return not self.missing and self.largest <= self.tolerance and same_routes


def compare_states(
    requests: Mapping[str, EngineRequest], off: Answers, on: Answers, dtype: torch.dtype
) -> StateComparison:
    """Return the comparison of all hidden states of two runs.

    Args:
        requests: The requests by id.
        off, on: The answers without and with speculation, respectively.
        dtype: Type of the model's weights.
    """
    compared, missing, largest, worst = 0, 0, 0.0, ""
    routed = rerouted = 0
    for name, request in requests.items():
        if not request.states.wanted:
            continue
        answers = [one.tokens.get(name, ()) for one in (off, on)]
        prompt = len(request.prompt_ids)
        # The states of a token depend on the tokens before it and on the token itself.
        equal = prompt + common_length(*answers)
        if request.states.routed_experts:
            start = request.states.start
            routes = [_routes(one.states.get(name, ()), start, equal) for one in (off, on)]
            expected = [min(equal, prompt + len(answer) - 1) - start for answer in answers]
            missing += sum(abs(len(one) - count) for one, count in zip(routes, expected, strict=True))
            pairs = list(zip(*routes, strict=False))
            routed += len(pairs)
            rerouted += sum(one != other for one, other in pairs)
            worst = worst or (name if any(one != other for one, other in pairs) else "")
            continue
        rows = [_rows(one.states.get(name, ()), equal) for one in (off, on)]
        expected = [min(equal, prompt + len(answer) - 1) for answer in answers]
        missing += sum(abs(one.shape[0] - count) for one, count in zip(rows, expected, strict=True))
        shared = min(one.shape[0] for one in rows)
        compared += shared
        if not shared:
            continue
        norms = np.linalg.norm(rows[0][:shared], axis=1)
        apart = np.linalg.norm(rows[0][:shared] - rows[1][:shared], axis=1) / np.maximum(norms, 1e-30)
        if not float(apart.max()) <= largest:
            largest, worst = float(apart.max()), name
    tolerance = max(LEAST_TOLERANCE, ROUNDINGS * NEAR_TIE.get(dtype, 0.0))
    return StateComparison(
        compared, missing, largest, worst, tolerance, routed, rerouted, MOST_REROUTED.get(dtype, 0.0)
    )


def _routes(parts: Sequence[TokenStates], start: int, stop: int) -> list[bytes]:
    """Return the routed experts of each token from `start` to before `stop`."""
    states = join_states(parts).between(start, stop)
    if states is None:
        return []
    size = len(states.routed_experts) // states.count
    return [states.routed_experts[at * size : (at + 1) * size] for at in range(states.count)]


def _rows(parts: Sequence[TokenStates], stop: int) -> np.ndarray:
    """Return the hidden states of the tokens before `stop`, ``[tokens, hidden_size]``."""
    states = join_states(parts).between(0, stop)
    if states is None:
        return np.zeros((0, 0), np.float32)
    return np.frombuffer(states.hidden_states, "<f4").reshape(states.count, -1)
