"""logit_rules: penalties, biases and forbidden tokens, applied to the logits after each node of a tree.

A rule may depend on earlier tokens. For example, a penalty counts how often a token has occurred. At a tree
node, the tokens on the node's path also count as earlier tokens. Speculation therefore does not change which
tokens are generated.

The device counts the tokens, because the host launches a round before it has read the previous one's result.
A round uses three ops. A packed row is a row of `packed_round`, and stands for one tree node.

1. `locate_rules` finds the rules of every packed row, and the path from the root to its node.
2. `apply_rules` returns the changed logits, from which `choose_tokens` then chooses tokens.
3. `record_outputs` counts the tokens that the round has generated.

For a slot without rules, each op only loads one flag.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.logit_rules import reference
from outrider.kernels.logit_rules.types import (
    COUNT_MASK,
    ENDS,
    FORBIDDEN,
    IN_PROMPT,
    TAIL,
    OutputRows,
    RuleRows,
    RuleState,
)

__all__ = [
    "COUNT_MASK",
    "ENDS",
    "FORBIDDEN",
    "IN_PROMPT",
    "TAIL",
    "OutputRows",
    "RuleRows",
    "RuleState",
    "apply_rules",
    "locate_rules",
    "make_rule_state",
    "record_outputs",
]

_LAST = (1 << 31) - 1


def make_rule_state(
    slots: int,
    vocab: int,
    device: torch.device,
    *,
    biases: int = 1024,
    phrases: int = 256,
    tokens: int = 2048,
) -> RuleState:
    """Allocate the rule state (`RuleState`) of slots that have no rules yet.

    Args:
        slots: Number of slots.
        vocab: Size of the vocabulary.
        device: Device of the tensors.
        biases: B, the largest number of biases of a slot.
        phrases: P, the largest number of bad words of a slot.
        tokens: T, the largest total number of tokens in all bad words of a slot.

    Example:
        >>> import torch
        >>> from outrider.kernels.logit_rules import make_rule_state
        >>> state = make_rule_state(2, 5, torch.device("cpu"))
        >>> state.words.shape, state.tops.tolist()
        (torch.Size([2, 5]), [-1, -1])
    """

    def ints(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    return RuleState(
        active=ints(slots),
        words=ints(slots, vocab),
        presence=torch.zeros(slots, device=device),
        frequency=torch.zeros(slots, device=device),
        repetition=torch.ones(slots, device=device),
        first_ends=ints(slots),
        starts=ints(slots),
        num_biases=ints(slots),
        bias_tokens=ints(slots, biases, value=_LAST),
        bias_values=torch.zeros((slots, biases), device=device),
        num_phrases=ints(slots),
        phrase_starts=ints(slots, phrases + 1),
        phrase_tokens=ints(slots, tokens),
        tail=ints(slots, TAIL),
        tops=ints(slots, value=-1),
    )


def locate_rules(
    state: RuleState,
    starts: torch.Tensor,
    table_rows: torch.Tensor,
    cached_lens: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    columns: int,
) -> RuleRows:
    """Find the rules and the path of every packed row, and the tokens that would complete a bad word next.

    Args:
        state: The rules of all slots.
        starts: ``[E + 1] int32``, the first row of each entry (`packed_round.Entries`).
        table_rows: ``[E] int32``, the slot of each entry; -1 for an idle entry (`PlacedEntries`).
        cached_lens: ``[E] int32``, index of each entry's root in the sequence (`PlacedEntries`).
        tokens, parents, depths: ``[M] int32``, the packed trees (`PackedTrees`).
        num_nodes: ``[E] int32``, number of nodes of each tree.
        columns: D, the largest depth of a node whose token can be accepted. Deeper nodes get no rules,
            because they are never accepted.

    Returns:
        The rules of the rows.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        Slot 0 has rules and a tree of three nodes in a chain. The bad word (7, 8) ends after the node with
        token 7.

        >>> import torch
        >>> from outrider.kernels.logit_rules import locate_rules, make_rule_state
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> state = make_rule_state(1, 10, torch.device("cpu"))
        >>> state.active[0] = state.num_phrases[0] = 1
        >>> state.phrase_starts[0, 1], state.phrase_tokens[0, :2] = 2, ints(7, 8)
        >>> rows = locate_rules(
        ...     state, ints(0, 3), ints(0), ints(4), ints(6, 7, 9), ints(-1, 0, 1), ints(0, 1, 2), ints(3), 2
        ... )
        >>> rows.depths.tolist(), rows.paths[2].tolist()
        ([0, 1, 2], [7, 9])
        >>> rows.num_banned.tolist(), rows.banned[1, 0].item()
        ([0, 1, 0], 8)
    """
    (entries,), (rows,) = table_rows.shape, tokens.shape
    expect("starts", starts, (entries + 1,), torch.int32)
    expect("table_rows", table_rows, (entries,), torch.int32)
    expect("cached_lens", cached_lens, (entries,), torch.int32)
    expect("tokens", tokens, (rows,), torch.int32)
    expect("parents", parents, (rows,), torch.int32)
    expect("depths", depths, (rows,), torch.int32)
    expect("num_nodes", num_nodes, (entries,), torch.int32)
    _expect_state(state)
    arguments = (state, starts, table_rows, cached_lens, tokens, parents, depths, num_nodes, columns)
    if use_triton(tokens):
        from outrider.kernels.logit_rules import triton as compiled

        return compiled.locate_rules(*arguments)
    return reference.locate_rules(*arguments)


def apply_rules(logits: torch.Tensor, rules: RuleRows, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits after penalties, biases and forbidden tokens are applied, in fp32.

    Rows without rules are only converted to fp32.

    Let c be the number of times that a token occurs in the output and on the row's path. In a row with rules,
    the logit of the token changes in four steps:

    1. Add the token's bias.
    2. If the prompt contains the token or c > 0, divide a positive logit by the repetition penalty, or
       multiply a negative logit by the repetition penalty.
    3. Subtract c times the frequency penalty. If c > 0, also subtract the presence penalty.
    4. Set forbidden tokens to -inf: tokens that are always forbidden, tokens that end the text before its
       minimum length, and tokens that would complete a bad word.

    Args:
        logits: ``[M, V]`` fp32/bf16/fp16; not changed.
        rules: The rules of the rows.
        positions: ``[M] int64``, index of the token to choose after each row.

    Returns:
        ``[M, V] fp32``.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        Token 1 occurs twice in the output. Token 2 has a bias. Token 3 would end the text before its minimum
        length.

        >>> import torch
        >>> from outrider.kernels.logit_rules import ENDS, RuleRows, apply_rules, make_rule_state
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> state = make_rule_state(1, 4, torch.device("cpu"))
        >>> state.active[0], state.frequency[0], state.presence[0], state.first_ends[0] = 1, 0.5, 0.25, 9
        >>> state.words[0] = ints(0, 2, 0, ENDS)
        >>> state.num_biases[0], state.bias_tokens[0, 0], state.bias_values[0, 0] = 1, 2, -3.0
        >>> none = torch.zeros(1, 1, dtype=torch.int32)
        >>> rules = RuleRows(state, ints(0), depths=ints(0), paths=none, num_banned=ints(0), banned=none)
        >>> apply_rules(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), rules, torch.tensor([8]))
        tensor([[1.0000, 0.7500, 0.0000,   -inf]])
    """
    rows = logits.shape[0]
    _expect_state(rules.state)
    expect("logits", logits, (rows, rules.state.words.shape[1]))
    expect("rules.slots", rules.slots, (rows,), torch.int32)
    expect("rules.depths", rules.depths, (rows,), torch.int32)
    expect("rules.paths", rules.paths, (rows, None), torch.int32)
    expect("rules.num_banned", rules.num_banned, (rows,), torch.int32)
    expect("rules.banned", rules.banned, (rows, None), torch.int32)
    expect("positions", positions, (rows,), torch.int64)
    if use_triton(logits):
        from outrider.kernels.logit_rules import triton as compiled

        return compiled.apply_rules(logits, rules, positions)
    return reference.apply_rules(logits, rules, positions)


def record_outputs(
    state: RuleState,
    starts: torch.Tensor,
    table_rows: torch.Tensor,
    cached_lens: torch.Tensor,
    packed: torch.Tensor,
    rows: int,
) -> OutputRows:
    """Add a round's tokens to the counts in `state`, and return the rows of logits used to choose them.

    Args:
        state: The rules of all slots; `words` and `tail` of slots with rules are changed in place.
        starts: ``[E + 1] int32``, the first row of each entry.
        table_rows: ``[E] int32``, the slot of each entry; -1 for an idle entry.
        cached_lens: ``[E] int32``, index of each entry's root in the sequence.
        packed: ``[B, 2 + 2 R] int32``, the result of the round (`packed_round.AcceptedEntries`).
        rows: M, the number of packed rows.

    Returns:
        The rows of logits from which the tokens were chosen.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        One draft token (8) is accepted, at node 2, and 9 is the bonus token. The client wants logprobs with
        five alternatives.

        >>> import torch
        >>> from outrider.kernels.logit_rules import make_rule_state, record_outputs
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> state = make_rule_state(1, 10, torch.device("cpu"))
        >>> state.active[0], state.tops[0] = 1, 5
        >>> outputs = record_outputs(state, ints(0, 3), ints(0), ints(4), ints([1, 3, 0, 2, 8, 9]), rows=4)
        >>> outputs.rows.tolist(), outputs.tops.tolist()
        ([0, 2, 0, 0], [5, 5, -1, -1])
        >>> state.words[0].tolist(), state.tail[0, 5:7].tolist()
        ([0, 0, 0, 0, 0, 0, 0, 0, 1, 1], [8, 9])
    """
    (entries,), results = table_rows.shape, packed.shape[0]
    expect("starts", starts, (entries + 1,), torch.int32)
    expect("table_rows", table_rows, (entries,), torch.int32)
    expect("cached_lens", cached_lens, (entries,), torch.int32)
    expect("packed", packed, (results, None), torch.int32)
    expect_contiguous("packed", packed)
    _expect_state(state)
    if results > entries:
        raise ValueError(f"packed has {results} rows, but there are {entries} entries")
    if use_triton(packed):
        from outrider.kernels.logit_rules import triton as compiled

        return compiled.record_outputs(state, starts, table_rows, cached_lens, packed, rows)
    return reference.record_outputs(state, starts, table_rows, cached_lens, packed, rows)


def _expect_state(state: RuleState) -> None:
    slots = state.active.shape[0]
    for name in ("active", "first_ends", "starts", "num_biases", "num_phrases", "tops"):
        expect(f"state.{name}", getattr(state, name), (slots,), torch.int32)
    for name in ("presence", "frequency", "repetition"):
        expect(f"state.{name}", getattr(state, name), (slots,), torch.float32)
    expect("state.tail", state.tail, (slots, TAIL), torch.int32)
    expect("state.bias_values", state.bias_values, (slots, state.bias_tokens.shape[1]), torch.float32)
    for name in ("words", "bias_tokens", "bias_values", "phrase_starts", "phrase_tokens", "tail"):
        table = getattr(state, name)
        expect(f"state.{name}", table, (slots, None), torch.float32 if name == "bias_values" else torch.int32)
        expect_contiguous(f"state.{name}", table)
