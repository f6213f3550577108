"""Triton version of logit_rules: each op is one launch. `kernels.logit_rules` documents the ops.

`locate_rules` and `record_outputs` launch one program per packed row (tree node). Program i handles entry i,
if there is one. It also handles row i, if this row is padding. A round has at most one entry per packed row.
`apply_rules` launches one program per row and part of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.logit_rules import types
from outrider.kernels.logit_rules.types import OutputRows, RuleRows, RuleState

_COUNT_MASK = tl.constexpr(types.COUNT_MASK)
_IN_PROMPT = tl.constexpr(types.IN_PROMPT)
_ENDS = tl.constexpr(types.ENDS)
_FORBIDDEN = tl.constexpr(types.FORBIDDEN)
_TAIL = tl.constexpr(types.TAIL)
_LAST = tl.constexpr((1 << 31) - 1)
_NODES = 64  # rows of an entry that a program visits at a time
_BLOCK = 2048  # tokens of a part


@triton.jit(do_not_specialize=["entries", "rows"])
def _locate(
    active, output_starts, num_phrases, phrase_starts, phrase_tokens, tail, starts, table_rows, cached_lens,
    tokens, parents, depths, num_nodes, slots, lengths, paths, num_banned, banned, entries, rows, columns,
    phrases, phrase_room,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    entry = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    if (entry < rows) & (entry >= tl.load(starts + entries)):
        # The program's number is also the number of a padding row.
        tl.store(slots + entry, -1)
        tl.store(lengths + entry, 0)
        tl.store(num_banned + entry, 0)
    if entry < entries:
        start = tl.load(starts + entry)
        width = tl.load(starts + entry + 1) - start
        slot = tl.load(table_rows + entry)
        at = tl.maximum(slot, 0).to(tl.int64)
        ruled = (slot >= 0) & (tl.load(active + at) > 0)
        nodes = tl.where(ruled, tl.load(num_nodes + entry), 0)
        root = tl.load(cached_lens + entry)
        words = tl.where(ruled, tl.load(num_phrases + at), 0)
        begin = tl.load(output_starts + at)
        if PDL:
            gdc_launch_dependents()
        for first in range(0, width, BLOCK):
            node = first + offset
            row = start + node
            inside = node < width
            depth = tl.load(depths + row, mask=inside & (node > 0) & (node < nodes), other=0)
            real = inside & (node < nodes) & (depth <= columns)
            depth = tl.where(real, depth, 0)
            tl.store(slots + row, tl.where(real, slot, -1), mask=inside)
            tl.store(lengths + row, depth, mask=inside)
            # 1. Walk up from each node to its root.
            above = node
            for step in range(tl.max(depth, 0)):
                on = real & (step < depth)
                token = tl.load(tokens + start + above, mask=on, other=0)
                tl.store(paths + row * columns + depth - 1 - step, token, mask=on)
                above = tl.load(parents + start + above, mask=on, other=0)
            # 2. Compare the ends of the paths with the bad words. The paths are read back.
            found = tl.zeros((BLOCK,), tl.int32)
            if words > 0:
                tl.debug_barrier()
            for word in range(words):
                low = tl.load(phrase_starts + at * (phrases + 1) + word)
                last = tl.load(phrase_starts + at * (phrases + 1) + word + 1) - 1
                fits = real
                back = 1
                while (last - back >= low) & (tl.max(fits.to(tl.int32), 0) > 0):
                    wanted = tl.load(phrase_tokens + at * phrase_room + last - back)
                    index = root + depth - back + 1
                    on_path = fits & (index > root)
                    drafted = tl.load(paths + row * columns + index - root - 1, mask=on_path, other=-1)
                    stored = fits & (index <= root) & (index >= begin)
                    written = tl.load(tail + at * _TAIL + index % _TAIL, mask=stored, other=-1)
                    fits = fits & (tl.where(index > root, drafted, written) == wanted)
                    back += 1
                end = tl.load(phrase_tokens + at * phrase_room + last)
                tl.store(banned + row * phrases + found, tl.zeros_like(found) + end, mask=fits)
                found += fits.to(tl.int32)
            tl.store(num_banned + row, found, mask=inside)


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
    entries, rows, device = table_rows.shape[0], tokens.shape[0], tokens.device
    phrases = state.phrase_starts.shape[1] - 1
    slots, lengths, num_banned = (_launch.empty((rows,), torch.int32, device) for _ in range(3))
    paths = _launch.empty((rows, columns), torch.int32, device)
    banned = _launch.empty((rows, phrases), torch.int32, device)
    if max(entries, rows):
        with _launch.on_device_of(tokens):
            _locate[(max(entries, rows),)](
                state.active, state.starts, state.num_phrases, state.phrase_starts, state.phrase_tokens,
                state.tail, starts, table_rows, cached_lens, tokens, parents, depths, num_nodes, slots,
                lengths, paths, num_banned, banned, entries, rows, columns, phrases,
                state.phrase_tokens.shape[1], BLOCK=_NODES, num_warps=1, **_launch.dependent(tokens),
            )  # fmt: skip
    return RuleRows(state, slots, lengths, paths, num_banned, banned)


@triton.jit(do_not_specialize=["columns", "phrases"])
def _apply(
    logits, row_stride, slots, lengths, paths, num_banned, banned, positions, words, presence, frequency,
    repetition, first_ends, num_biases, bias_tokens, bias_values, scores, vocab, columns, phrases,
    BIASES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    score = tl.load(logits + row * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        word = tl.load(words + slot * vocab + token, mask=inside, other=0)
        # The output consists of the slot's tokens and the path of the row's node.
        count = word & _COUNT_MASK
        for step in range(tl.load(lengths + row)):
            count += (token == tl.load(paths + row * columns + step)).to(tl.int32)
        # 1. Biases. They are in the order of their tokens, so those of this part are neighbours.
        known = tl.load(num_biases + slot)
        if known > 0:
            which = tl.arange(0, BIASES)
            listed = tl.load(bias_tokens + slot * BIASES + which, mask=which < known, other=_LAST)
            low = tl.sum((listed < split * BLOCK).to(tl.int32), 0)
            high = tl.sum((listed < split * BLOCK + BLOCK).to(tl.int32), 0)
            for one in range(low, high):
                biased = token == tl.load(bias_tokens + slot * BIASES + one)
                score += tl.where(biased, tl.load(bias_values + slot * BIASES + one), 0.0)
        # 2. The repetition penalty.
        penalty = tl.load(repetition + slot)
        seen = (count > 0) | ((word & _IN_PROMPT) != 0)
        repeated = tl.where(score > 0, tl.div_rn(score, tl.zeros_like(score) + penalty), score * penalty)
        score = tl.where(seen, repeated, score)
        # 3. Frequency and presence penalties.
        score -= tl.load(frequency + slot) * count.to(tl.float32)
        score -= tl.where(count > 0, tl.load(presence + slot), 0.0)
        # 4. Forbidden tokens.
        early = tl.load(positions + row) < tl.load(first_ends + slot)
        forbidden = ((word & _FORBIDDEN) != 0) | (early & ((word & _ENDS) != 0))
        for one in range(tl.load(num_banned + row)):
            forbidden = forbidden | (token == tl.load(banned + row * phrases + one))
        score = tl.where(forbidden, -float("inf"), score)
    if PDL:
        gdc_launch_dependents()
    tl.store(scores + row * vocab + token, score, mask=inside)


def apply_rules(logits: torch.Tensor, rules: RuleRows, positions: torch.Tensor) -> torch.Tensor:
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    scores = _launch.empty((rows, vocab), torch.float32, logits.device)
    state = rules.state
    biases = state.bias_tokens.shape[1]
    if biases & (biases - 1):
        raise ValueError(f"state.bias_tokens has {biases} columns, expected a power of two")
    if rows:
        with _launch.on_device_of(logits):
            _apply[(rows, _launch.ceil_div(vocab, _BLOCK))](
                logits, logits.stride(0), rules.slots.contiguous(), rules.depths.contiguous(),
                rules.paths.contiguous(), rules.num_banned.contiguous(), rules.banned.contiguous(),
                positions.contiguous(), state.words, state.presence, state.frequency, state.repetition,
                state.first_ends, state.num_biases, state.bias_tokens, state.bias_values, scores, vocab,
                rules.paths.shape[1], rules.banned.shape[1], BIASES=biases, BLOCK=_BLOCK, num_warps=8,
                **_launch.dependent(logits),
            )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["results", "rows", "columns"], do_not_specialize_on_alignment=["starts"])
def _record(
    active, words, tail, tops, starts, table_rows, cached_lens, packed, out_rows, out_tops, results, rows,
    vocab, columns,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    entry = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    if (entry < rows) & (entry >= tl.load(starts + results)):
        # The program's number is also the number of a row behind the rows of all real entries.
        tl.store(out_rows + entry + offset, tl.zeros((BLOCK,), tl.int64), mask=offset == 0)
        tl.store(out_tops + entry + offset, tl.full((BLOCK,), -1, tl.int32), mask=offset == 0)
    if entry < results:
        start = tl.load(starts + entry)
        width = tl.load(starts + entry + 1) - start
        slot = tl.load(table_rows + entry).to(tl.int64)
        cached = tl.load(cached_lens + entry)
        result = packed + entry * (2 + 2 * columns)
        accepted = tl.load(result)
        live = (slot >= 0) & (accepted >= 0)
        column = tl.arange(0, COLUMNS)
        chosen = live & (column <= accepted)
        walked = tl.load(result + 2 + column, mask=chosen, other=0)
        said = tl.load(result + 2 + columns + column, mask=chosen, other=-1)
        top = tl.load(tops + slot, mask=live, other=-1)
        ruled = tl.load(active + slot, mask=live, other=0) > 0
        counted = chosen & ruled & (said >= 0)
        if PDL:
            gdc_launch_dependents()
        for first in range(0, width, BLOCK):
            node = first + offset
            unused = (node < width) & ((node > accepted) | (live == 0))
            tl.store(out_rows + start + node, tl.zeros((BLOCK,), tl.int64), mask=unused)
            tl.store(out_tops + start + node, tl.full((BLOCK,), -1, tl.int32), mask=unused)
        tl.store(out_rows + start + column, (start + walked).to(tl.int64), mask=chosen)
        tl.store(out_tops + start + column, tl.zeros_like(column) + top, mask=chosen)
        tl.atomic_add(words + slot * vocab + said, tl.full((COLUMNS,), 1, tl.int32), mask=counted)
        tl.store(tail + slot * _TAIL + (cached + 1 + column) % _TAIL, said, mask=counted)


def record_outputs(
    state: RuleState,
    starts: torch.Tensor,
    table_rows: torch.Tensor,
    cached_lens: torch.Tensor,
    packed: torch.Tensor,
    rows: int,
) -> OutputRows:
    results, columns, device = packed.shape[0], (packed.shape[1] - 2) // 2, packed.device
    outputs = OutputRows(
        _launch.empty((rows,), torch.int64, device), _launch.empty((rows,), torch.int32, device)
    )
    if max(results, rows):
        with _launch.on_device_of(packed):
            _record[(max(results, rows),)](
                state.active, state.words, state.tail, state.tops, starts, table_rows, cached_lens, packed,
                outputs.rows, outputs.tops, results, rows, state.words.shape[1], columns,
                COLUMNS=_launch.lanes(columns), BLOCK=_NODES, num_warps=1,
                **_launch.dependent(packed),
            )  # fmt: skip
    return outputs
