"""Checks of logit_rules, token_logprobs and token_masks, interpreted on a CPU and compiled on a GPU."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.logit_rules import (
    ENDS,
    FORBIDDEN,
    IN_PROMPT,
    TAIL,
    RuleRows,
    RuleState,
    apply_rules,
    locate_rules,
    make_rule_state,
    record_outputs,
)
from outrider.kernels.token_logprobs import MAX_TOP, token_logprobs
from outrider.kernels.token_masks import mask_tokens

SLOTS, COLUMNS = 5, 4


def drawn_state(rng: random.Random, vocab: int) -> RuleState:
    """Return the rules of slots, of which the last one has none. The bad words are likely to match."""
    state = make_rule_state(SLOTS, vocab, torch.device("cpu"), biases=16, phrases=6, tokens=24)
    for slot in range(SLOTS - 1):
        state.active[slot] = 1
        state.presence[slot], state.frequency[slot] = rng.uniform(-2, 2), rng.uniform(-2, 2)
        state.repetition[slot] = rng.choice([1.0, 0.6, 1.9])
        state.starts[slot] = rng.choice([1, 3, 70])
        state.first_ends[slot] = state.starts[slot] + rng.choice([0, 90])
        flags = [rng.choice([0, 0, IN_PROMPT, ENDS, FORBIDDEN, ENDS | IN_PROMPT]) for _ in range(vocab)]
        counts = [rng.choice([0, 0, 0, 1, 3]) for _ in range(vocab)]
        state.words[slot] = torch.tensor(flags, dtype=torch.int32) + torch.tensor(counts, dtype=torch.int32)
        biased = sorted(rng.sample(range(vocab), rng.choice([0, 1, min(16, vocab)])))
        state.num_biases[slot] = len(biased)
        state.bias_tokens[slot, : len(biased)] = torch.tensor(biased, dtype=torch.int32)
        state.bias_values[slot] = torch.tensor([rng.uniform(-9, 9) for _ in range(16)])
        words = [
            [rng.randrange(3) for _ in range(rng.choice([2, 2, 3, 4]))] for _ in range(rng.choice([0, 6, 6]))
        ]
        state.num_phrases[slot] = len(words)
        state.phrase_starts[slot, 1:] = torch.tensor(
            [sum(len(word) for word in words[: count + 1]) for count in range(6)], dtype=torch.int32
        )
        flat = [token for word in words for token in word]
        state.phrase_tokens[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        state.tail[slot] = torch.tensor([rng.randrange(3) for _ in range(TAIL)], dtype=torch.int32)
        state.tops[slot] = rng.choice([-1, 0, 7])
    return state


def drawn_trees(rng: random.Random, padding: int) -> dict[str, torch.Tensor]:
    """Return packed trees for entries of all slots, an idle entry, and padding."""
    widths = [rng.choice([1, 3, 9]) for _ in range(SLOTS + 1)]
    starts = [sum(widths[:entry]) for entry in range(SLOTS + 2)]
    rows = starts[-1] + padding
    entries = rows
    tokens, parents, depths, nodes = [], [], [], []
    for width in widths:
        nodes.append(rng.randint(1, width))
        parent, depth = [-1], [0]
        for node in range(1, width):
            parent.append(rng.randrange(node))
            depth.append(depth[parent[-1]] + 1)
        tokens += [rng.randrange(3) for _ in range(width)]
        parents += parent
        depths += depth
    spare = [0] * padding

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    more = entries - len(widths)
    return {
        "starts": ints([*starts, *[min(rows, starts[-1] + each + 1) for each in range(more)]]),
        "table_rows": ints([*range(SLOTS), -1, *[-1] * more]),
        "cached_lens": ints([rng.choice([70, 71, 75]) for _ in widths] + [0] * more),
        "tokens": ints([*tokens, *spare]),
        "parents": ints([*parents, *spare]),
        "depths": ints([*depths, *spare]),
        "num_nodes": ints([*nodes, *[1] * more]),
    }


def moved(state: RuleState, put: Any) -> RuleState:
    return RuleState(**{one.name: put(getattr(state, one.name)) for one in fields(RuleState)})


def check_rules(
    device: str, dtype: torch.dtype, vocab: int, guards: Guards, seed: int, padding: int = 3
) -> int:
    """Check that rules are located, applied and recorded as by the reference.

    Returns:
        Number of bad words that match.
    """
    rng = random.Random(seed)
    state, trees = drawn_state(rng, vocab), drawn_trees(rng, padding)
    rows = trees["tokens"].shape[0]
    logits = (4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)
    positions = torch.tensor([rng.choice([5, 80, 120]) for _ in range(rows)])
    packed = drawn_results(rng, trees, vocab)

    def run(put: Any) -> tuple[RuleRows, torch.Tensor, Any, RuleState]:
        own = moved(state, put)
        given = {name: put(tensor) for name, tensor in trees.items()}
        located = locate_rules(own, **given, columns=COLUMNS)
        changed = apply_rules(put(logits), located, put(positions))
        places = (given["starts"], given["table_rows"], given["cached_lens"])
        return located, changed, record_outputs(own, *places, put(packed), rows), own

    with reference_version():
        expected, scores, outputs, after = run(lambda tensor: tensor.clone())
    with triton_version(guards):
        found, changed, recorded, counted = run(lambda tensor: guards.put(tensor.to(device)))
    assert torch.equal(found.slots.cpu(), expected.slots)
    assert torch.equal(found.num_banned.cpu(), expected.num_banned)
    for row in range(rows):
        depth, banned = int(expected.depths[row]), int(expected.num_banned[row])
        if expected.slots[row] >= 0:
            assert int(found.depths[row]) == depth
            assert found.paths[row, :depth].tolist() == expected.paths[row, :depth].tolist()
            assert found.banned[row, :banned].tolist() == expected.banned[row, :banned].tolist()
    torch.testing.assert_close(changed.cpu(), scores, rtol=1e-6, atol=1e-5)
    assert torch.equal(recorded.tops.cpu(), outputs.tops)
    wanted = outputs.tops >= 0
    assert torch.equal(recorded.rows.cpu()[wanted], outputs.rows[wanted])
    assert bool(((recorded.rows >= 0) & (recorded.rows < rows)).all()), "every row must be valid"
    assert torch.equal(counted.words.cpu(), after.words)
    assert torch.equal(counted.tail.cpu(), after.tail)
    assert not torch.equal(after.words, state.words)
    return int(expected.num_banned.sum())


def drawn_results(rng: random.Random, trees: dict[str, torch.Tensor], vocab: int) -> torch.Tensor:
    """Return results of a round: accepted paths, an entry that fails, and an idle entry."""
    columns, lines = COLUMNS + 1, []
    starts = trees["starts"].tolist()
    for entry in range(SLOTS + 1):
        width = starts[entry + 1] - starts[entry]
        accepted = rng.randint(0, min(width, columns) - 1) if entry < SLOTS else -1
        path = sorted(rng.sample(range(1, width), accepted)) if accepted > 0 else []
        emitted = [rng.randrange(vocab) for _ in range(accepted + 1)]
        if entry == 1:
            emitted[-1] = -1
        path = [0, *path] if accepted >= 0 else []
        lines.append(
            [
                accepted,
                width,
                *path,
                *[-1] * (columns - len(path)),
                *emitted,
                *[-1] * (columns - len(emitted)),
            ]
        )
    return torch.tensor(lines, dtype=torch.int32)


def check_logprobs(device: str, dtype: torch.dtype, vocab: int, guards: Guards) -> None:
    """Compare logprobs with the reference: ties, masked logits, and rows without requested logprobs."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(4, vocab, generator=generator)).to(dtype)
    logits[1] = logits[1].round()
    logits[2, : vocab // 2] = -torch.inf
    rows, tokens = torch.tensor([3, 1, 0, 2, 1]), torch.tensor([0, vocab - 1, -1, vocab - 2, 3])
    tops = torch.tensor([MAX_TOP, 5, 0, 3, -1], dtype=torch.int32)
    given = (logits, rows, tokens, tops)
    with reference_version():
        expected = token_logprobs(*given)
    with triton_version(guards):
        found = token_logprobs(*(guards.put(tensor.to(device)) for tensor in given)).cpu()
    wanted = tops >= 0
    ids = slice(1, 1 + MAX_TOP)
    assert torch.equal(found[wanted, ids], expected[wanted, ids])
    for part in (slice(0, 1), slice(1 + MAX_TOP, None)):
        values = [one[wanted, part].contiguous().view(torch.float32) for one in (found, expected)]
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)


def check_masks(device: str, dtype: torch.dtype, vocab: int, guards: Guards) -> None:
    """Compare masked logits with the reference: random bits, all bits and no bits."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator).to(dtype)
    allowed = torch.randint(-(1 << 31), 1 << 31, (4, -(-vocab // 32)), generator=generator).int()
    allowed[1], allowed[2] = -1, 0
    with reference_version():
        expected = mask_tokens(logits, allowed)
    bits = allowed[0].tolist()
    assert [bool(value > -torch.inf) for value in expected[0]] == [
        bool(bits[token // 32] >> token % 32 & 1) for token in range(vocab)
    ]
    assert torch.equal(expected[1], logits[1].float())
    with triton_version(guards):
        found = mask_tokens(guards.put(logits.to(device)), guards.put(allowed.to(device))).cpu()
    assert torch.equal(found, expected)


def check_choice_with_rules(device: str, vocab: int, guards: Guards, seed: int) -> None:
    """Check that `choose_tokens` applies rules before temperature and filters."""
    from outrider.kernels.verify import SamplingTensors, choose_tokens

    rng = random.Random(seed)
    state, trees = drawn_state(rng, vocab), drawn_trees(rng, 0)
    rows = trees["tokens"].shape[0]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).to(device)
    positions = torch.arange(rows, device=device) + 80
    ones = torch.ones(rows, device=device)
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    sampling = SamplingTensors(
        temperature=torch.tensor([rng.choice([0.0, 0.9]) for _ in range(rows)], device=device),
        top_k=zeros,
        top_p=ones * 0.95,
        min_p=zeros.float(),
        seeds=torch.arange(rows, device=device),
        choices=zeros,
        all_greedy=False,
        any_filter=True,
    )
    with triton_version(guards):
        own = moved(state, lambda tensor: guards.put(tensor.to(device)))
        given = {name: guards.put(tensor.to(device)) for name, tensor in trees.items()}
        located = locate_rules(own, **given, columns=COLUMNS)
        chosen = choose_tokens(logits, replace(sampling, rules=located), positions)
        changed = apply_rules(logits, located, positions)
        assert torch.equal(chosen, choose_tokens(changed, sampling, positions))
    with reference_version():
        assert not torch.equal(chosen, choose_tokens(logits, sampling, positions))
