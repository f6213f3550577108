"""Torch reference of logit_rules. `kernels.logit_rules` documents the ops."""

from __future__ import annotations

from itertools import pairwise

import torch

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
    device, rows = tokens.device, tokens.shape[0]
    slots = torch.full((rows,), -1, dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.int32)
    paths = torch.full((rows, columns), -1, dtype=torch.int32)
    num_banned = torch.zeros(rows, dtype=torch.int32)
    banned = torch.full((rows, state.phrase_starts.shape[1] - 1), -1, dtype=torch.int32)
    begins, entry_slots, nodes = starts.tolist(), table_rows.tolist(), num_nodes.tolist()
    for entry, slot in enumerate(entry_slots):
        if slot < 0 or not state.active[slot]:
            continue
        root = int(cached_lens[entry])
        phrases = _phrases(state, slot)
        for node in range(min(nodes[entry], begins[entry + 1] - begins[entry])):
            row = begins[entry] + node
            depth = int(depths[row]) if node else 0
            if depth > columns:
                continue
            path, at = [], node
            for _ in range(depth):
                path.append(int(tokens[begins[entry] + at]))
                at = int(parents[begins[entry] + at])
            path.reverse()
            slots[row], lengths[row] = slot, depth
            paths[row, :depth] = torch.tensor(path, dtype=torch.int32)
            found = [phrase[-1] for phrase in phrases if _ends_with(state, slot, root, path, phrase[:-1])]
            num_banned[row] = len(found)
            banned[row, : len(found)] = torch.tensor(found, dtype=torch.int32)
    return RuleRows(
        state,
        slots.to(device),
        lengths.to(device),
        paths.to(device),
        num_banned.to(device),
        banned.to(device),
    )


def _phrases(state: RuleState, slot: int) -> list[list[int]]:
    count = int(state.num_phrases[slot])
    bounds = state.phrase_starts[slot, : count + 1].tolist()
    tokens = state.phrase_tokens[slot].tolist()
    return [tokens[start:stop] for start, stop in pairwise(bounds)]


def _ends_with(state: RuleState, slot: int, root: int, path: list[int], wanted: list[int]) -> bool:
    """Return whether the output with this path ends with the wanted tokens."""
    last, start, tail = root + len(path), int(state.starts[slot]), state.tail[slot]
    for back, token in enumerate(reversed(wanted)):
        index = last - back
        if index < start:
            return False
        if (path[index - root - 1] if index > root else int(tail[index % TAIL])) != token:
            return False
    return True


def apply_rules(logits: torch.Tensor, rules: RuleRows, positions: torch.Tensor) -> torch.Tensor:
    scores = logits.to(torch.float32, copy=True)
    for row, slot in enumerate(rules.slots.tolist()):
        if slot >= 0:
            _apply(scores[row], rules, row, slot, int(positions[row]))
    return scores


def _apply(score: torch.Tensor, rules: RuleRows, row: int, slot: int, position: int) -> None:
    """Change the logits of one row, ``[V] fp32``, in place."""
    state = rules.state
    words = state.words[slot].clone()
    path = rules.paths[row, : int(rules.depths[row])].long()
    words.index_add_(0, path, torch.ones_like(path, dtype=torch.int32))
    counts = words & COUNT_MASK
    # 1. Biases.
    biases = int(state.num_biases[slot])
    score[state.bias_tokens[slot, :biases].long()] += state.bias_values[slot, :biases]
    # 2. The repetition penalty.
    penalty = state.repetition[slot]
    seen = (counts > 0) | ((words & IN_PROMPT) > 0)
    score.copy_(torch.where(seen, torch.where(score > 0, score / penalty, score * penalty), score))
    # 3. Frequency and presence penalties.
    score -= state.frequency[slot] * counts
    score -= torch.where(counts > 0, state.presence[slot], 0.0)
    # 4. Forbidden tokens.
    flags = FORBIDDEN | ENDS if position < int(state.first_ends[slot]) else FORBIDDEN
    score[(words & flags) > 0] = -torch.inf
    score[rules.banned[row, : int(rules.num_banned[row])].long()] = -torch.inf


def record_outputs(
    state: RuleState,
    starts: torch.Tensor,
    table_rows: torch.Tensor,
    cached_lens: torch.Tensor,
    packed: torch.Tensor,
    rows: int,
) -> OutputRows:
    columns = (packed.shape[1] - 2) // 2
    places = torch.zeros(rows, dtype=torch.int64)
    tops = torch.full((rows,), -1, dtype=torch.int32)
    begins, entry_slots = starts.tolist(), table_rows.tolist()
    for entry, (accepted, _, *rest) in enumerate(packed.tolist()):
        slot, start = entry_slots[entry], begins[entry]
        if accepted < 0 or slot < 0:
            continue
        path, emitted = rest[: accepted + 1], rest[columns : columns + accepted + 1]
        places[start : start + accepted + 1] = start + torch.tensor(path)
        tops[start : start + accepted + 1] = state.tops[slot]
        if not state.active[slot]:
            continue
        for column, token in enumerate(emitted):
            if token >= 0:
                state.words[slot, token] += 1
                state.tail[slot, (int(cached_lens[entry]) + 1 + column) % TAIL] = token
    device = packed.device
    return OutputRows(places.to(device), tops.to(device))
