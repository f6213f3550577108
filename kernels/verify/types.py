"""Data types of verify: sampling parameters per row, and the accepted path and tokens of each tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.logit_rules.types import RuleRows


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of each row of logits.

    Attributes:
        temperature: ``[rows] fp32``; 0 selects greedy decoding.
        top_k: ``[rows] int32``; 0 disables top-k.
        top_p: ``[rows] fp32``; 1 disables top-p.
        min_p: ``[rows] fp32``; 0 disables min-p.
        seeds: ``[rows] int64``, bit pattern of the request's 64-bit seed.
        choices: ``[rows] int32``, index among the n choices of the request.
        all_greedy: True if no row has a temperature above 0. This is a host value, so reading it does not
            wait for the device.
        any_filter: True if a row with a temperature above 0 uses top_k, top_p or min_p. Also a host value.
        rules: Penalties, biases and forbidden tokens of the rows (`kernels/logit_rules`), which change the
            logits first. None if no row has rules.
        allowed: ``[rows, ceil(V / 32)] int32``, one bit per token that may be chosen (`kernels/token_masks`).
            With None, all tokens may be chosen.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
    all_greedy: bool
    any_filter: bool
    rules: RuleRows | None = None
    allowed: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """Result of verifying one draft tree per sequence.

    Attributes:
        path: ``[bs, N] int32``, node indices of the root and the accepted drafts, padded with -1.
        num_accepted: ``[bs] int32``, number of accepted drafts, the root excluded.
        emitted: ``[bs, N] int32``, the accepted tokens, then the bonus token at column num_accepted, padded
            with -1. A bonus token of -1 means that the logits of the last accepted node were poisoned. The
            request must then fail.
    """

    path: torch.Tensor
    num_accepted: torch.Tensor
    emitted: torch.Tensor
