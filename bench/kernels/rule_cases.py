"""Cases of `outrider bench kernels` for sampling rules, token masks and logprobs of all rows of a round."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from outrider.bench.kernels.case import KernelCase, KernelOptions, over, small_kernel
from outrider.bench.kernels.inputs import KernelSizes, chain_inputs, copies_for
from outrider.bench.measure.floors import Work
from outrider.kernels.logit_rules import (
    RuleRows,
    RuleState,
    apply_rules,
    locate_rules,
    make_rule_state,
    record_outputs,
)
from outrider.kernels.token_logprobs import MAX_TOP, token_logprobs
from outrider.kernels.token_masks import mask_tokens

BIASES = 8
"""Number of biases per slot."""


def rule_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the kernels of rules, masks and logprobs. Each slot has a tree of `nodes` nodes."""
    for batch in sizes.batches:
        yield from _rules(sizes, options, batch)
        yield _masks(sizes, options, batch)
        yield from _logprobs(sizes, options, batch)


def _rules(sizes: KernelSizes, options: KernelOptions, batch: int) -> Iterator[KernelCase]:
    device, nodes, columns = sizes.device, sizes.nodes, sizes.steps + 1
    rows, case = batch * nodes, f"{batch} trees of {nodes} nodes"
    state, tree = _state(sizes, batch), chain_inputs(sizes, batch)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
    cached = torch.full((batch,), sizes.context, dtype=torch.int32, device=device)
    flat = (tree.tokens.flatten(), tree.parents.flatten(), tree.depths.flatten())
    locate = partial(locate_rules, state, starts, slots, cached, *flat, tree.num_nodes, columns)
    yield small_kernel(f"locate_rules, {case}", locate)
    logits = sizes.random(rows, sizes.vocab)
    positions = torch.full((rows,), sizes.context + 1, device=device)
    # The logits and the slots' words are read, and fp32 logits are written.
    moved = logits.nbytes + state.words.nbytes + 4.0 * logits.numel()
    copies = copies_for(logits.nbytes, options.small)
    many = [logits.clone() for _ in range(copies)]
    yield KernelCase(
        f"apply_rules, {case}", over(many, partial(_apply, locate(), positions)), Work(moved, 0.0), copies
    )
    # Every round accepts a path of full length.
    path = torch.arange(columns, dtype=torch.int32, device=device).clamp(max=nodes - 1)
    emitted = torch.randint(0, sizes.vocab, (batch, columns), dtype=torch.int32, device=device)
    head = torch.tensor([min(columns, nodes) - 1, nodes], dtype=torch.int32, device=device)
    packed = torch.cat([head.expand(batch, -1), path.expand(batch, -1), emitted], dim=1)
    record = partial(record_outputs, state, starts, slots, cached, packed.contiguous(), rows)
    yield small_kernel(f"record_outputs, {case}", record)


def _state(sizes: KernelSizes, slots: int) -> RuleState:
    """Return slots that have every kind of rule: penalties, biases, a minimum length, and a bad word."""
    state = make_rule_state(slots, sizes.vocab, sizes.device)
    state.active.fill_(1)
    state.words.random_(0, 2)
    state.presence.fill_(0.5)
    state.frequency.fill_(0.5)
    state.repetition.fill_(1.1)
    state.first_ends.fill_(2 * sizes.context)
    state.num_biases.fill_(BIASES)
    state.bias_tokens[:, :BIASES] = torch.arange(BIASES, dtype=torch.int32, device=sizes.device)
    state.bias_values[:, :BIASES] = 1.0
    state.num_phrases.fill_(1)
    state.phrase_starts[:, 1:] = 2
    state.phrase_tokens[:, :2] = torch.tensor([1, 2], dtype=torch.int32, device=sizes.device)
    state.tops.fill_(MAX_TOP)
    return state


def _apply(rules: RuleRows, positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return apply_rules(logits, rules, positions)


def _masks(sizes: KernelSizes, options: KernelOptions, batch: int) -> KernelCase:
    logits = sizes.random(batch * sizes.nodes, sizes.vocab)
    words = -(-sizes.vocab // 32)
    allowed = torch.full((len(logits), words), -1, dtype=torch.int32, device=sizes.device)
    copies = copies_for(logits.nbytes, options.small)
    many = [logits.clone() for _ in range(copies)]
    # The logits and the masks are read, and fp32 logits are written.
    moved = logits.nbytes + allowed.nbytes + 4.0 * logits.numel()
    name = f"mask_tokens, {batch} trees of {sizes.nodes} nodes"
    return KernelCase(name, over(many, partial(_mask, allowed)), Work(moved, 0.0), copies)


def _mask(allowed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return mask_tokens(logits, allowed)


def _logprobs(sizes: KernelSizes, options: KernelOptions, batch: int) -> Iterator[KernelCase]:
    logits = sizes.random(batch, sizes.vocab)
    rows = torch.arange(batch, device=sizes.device)
    tokens = torch.randint(0, sizes.vocab, (batch,), device=sizes.device)
    copies = copies_for(logits.nbytes, options.small)
    many = [logits.clone() for _ in range(copies)]
    for top in (0, MAX_TOP):
        tops = torch.full((batch,), top, dtype=torch.int32, device=sizes.device)
        call = over(many, partial(_report, rows, tokens, tops))
        name = f"token_logprobs, {batch} tokens, {top} alternatives"
        yield KernelCase(name, call, Work(logits.nbytes, 0.0), copies)


def _report(
    rows: torch.Tensor, tokens: torch.Tensor, tops: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    return token_logprobs(logits, rows, tokens, tops)
