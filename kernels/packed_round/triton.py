"""Triton version of packed_round: each op is one launch. `kernels.packed_round` documents the ops.

A program of one warp handles one entry and its packed rows. It visits the rows in blocks, so that one
compiled kernel handles trees of any size. A round cannot have more entries than packed rows, so a grid has
one program per packed row. Program i also writes row i if this row is padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.packed_round.types import (
    AcceptedEntries,
    Entries,
    GroupRows,
    PackedTrees,
    PlacedEntries,
    SlotState,
)
from outrider.kernels.verify.types import SamplingTensors

_BLOCK = 64  # rows of an entry that a program visits at a time; most trees are a single block
_FEATURE_BLOCK = 2048  # feature elements that a program copies


@triton.jit
def _store_row_parameters(
    row, real, heat, k, p, least, seed, choice, temperature, top_k, top_p, min_p, seeds, choices, inside
):  # fmt: skip
    """Store the sampling parameters of rows; rows that are not real get neutral parameters."""
    tl.store(temperature + row, tl.where(real, heat, 0.0), mask=inside)
    tl.store(top_k + row, tl.where(real, k, 0), mask=inside)
    tl.store(top_p + row, tl.where(real, p, 1.0), mask=inside)
    tl.store(min_p + row, tl.where(real, least, 0.0), mask=inside)
    tl.store(seeds + row, tl.where(real, seed, 0), mask=inside)
    tl.store(choices + row, tl.where(real, choice, 0), mask=inside)


@triton.jit(do_not_specialize=["entries", "rows", "columns", "pages", "words"])
def _place(
    slots, starts, drafted, committed_lens, limits, slot_tokens, counts, tokens, parents, depths, ancestors,
    logprobs, num_nodes, page_table, slot_temperature, slot_top_k, slot_top_p, slot_min_p, slot_seeds,
    slot_choices, cached_lens, kv_lens, table_rows, positions, next_positions, kv_slots, temperature, top_k,
    top_p, min_p, seeds, choices, entries, rows, columns, pages, words,
    PAGE_SIZE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    entry = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    if (entry < rows) & (entry >= tl.load(starts + entries)):
        # The program's number is also the number of a padding row.
        inside = offset == 0
        row = entry + offset
        tl.store(positions + row, tl.zeros((BLOCK,), tl.int64), mask=inside)
        tl.store(next_positions + row, tl.full((BLOCK,), 1, tl.int64), mask=inside)
        tl.store(kv_slots + row, tl.full((BLOCK,), -1, tl.int64), mask=inside)
        _store_row_parameters(
            row, row < 0, 0.0, 0, 1.0, 0.0, 0, 0, temperature, top_k, top_p, min_p, seeds, choices, inside
        )
    if entry < entries:
        slot = tl.load(slots + entry)
        start = tl.load(starts + entry)
        width = tl.load(starts + entry + 1) - start
        at = tl.maximum(slot, 0).to(tl.int64)
        count, committed = tl.load(counts + at), tl.load(committed_lens + at)
        live = (slot >= 0) & (width > 0) & (count > 0) & (committed < tl.load(limits + at))
        tree = live & (tl.load(drafted + entry) > 0)
        nodes = tl.where(tree, tl.load(num_nodes + entry), 1)
        cached = tl.where(live, committed - 1, 0)
        root = tl.load(slot_tokens + at * columns + count - 1, mask=live, other=0)
        heat, k = tl.load(slot_temperature + at), tl.load(slot_top_k + at)
        p, least = tl.load(slot_top_p + at), tl.load(slot_min_p + at)
        seed, choice = tl.load(slot_seeds + at), tl.load(slot_choices + at)
        if PDL:
            gdc_launch_dependents()
        # 1. Write the roots of entries without a drafted tree, and of idle entries.
        if tree == 0:
            tl.store(num_nodes + entry, 1)
            if width > 0:
                word = tl.arange(0, WORDS)
                tl.store(tokens + start, root)
                tl.store(parents + start, -1)
                tl.store(depths + start, 0)
                tl.store(logprobs + start, 0.0)
                tl.store(ancestors + start * words + word, (word == 0).to(tl.int32), mask=word < words)
        # 2. Locate the rows.
        tl.store(cached_lens + entry, cached)
        tl.store(kv_lens + entry, tl.where(live, cached + nodes, 0))
        tl.store(table_rows + entry, tl.where(live, slot, -1))
        for first in range(0, width, BLOCK):
            node = first + offset
            row = start + node
            inside = node < width
            real = inside & live & (node < nodes)
            depth = tl.load(depths + row, mask=real & tree, other=0)
            position = tl.where(real, cached + depth, 0).to(tl.int64)
            index = cached + node
            page = tl.load(page_table + at * pages + index // PAGE_SIZE, mask=real, other=0).to(tl.int64)
            tl.store(positions + row, position, mask=inside)
            tl.store(next_positions + row, position + 1, mask=inside)
            tl.store(kv_slots + row, tl.where(real, page * PAGE_SIZE + index % PAGE_SIZE, -1), mask=inside)
            _store_row_parameters(
                row, real, heat, k, p, least, seed, choice, temperature, top_k, top_p, min_p, seeds, choices,
                inside,
            )  # fmt: skip


def place_entries(
    state: SlotState,
    entries: Entries,
    trees: PackedTrees,
    page_table: torch.Tensor,
    page_size: int,
    sampling: SamplingTensors,
) -> PlacedEntries:
    count, rows, device = entries.slots.shape[0], trees.tokens.shape[0], trees.tokens.device
    words = trees.ancestors.shape[1]
    of_rows = replace(
        sampling,
        temperature=_launch.empty((rows,), torch.float32, device),
        top_k=_launch.empty((rows,), torch.int32, device),
        top_p=_launch.empty((rows,), torch.float32, device),
        min_p=_launch.empty((rows,), torch.float32, device),
        seeds=_launch.empty((rows,), torch.int64, device),
        choices=_launch.empty((rows,), torch.int32, device),
    )
    cached, kv, table_rows = (_launch.empty((count,), torch.int32, device) for _ in range(3))
    positions, after, kv_slots = (_launch.empty((rows,), torch.int64, device) for _ in range(3))
    placed = PlacedEntries(cached, kv, table_rows, positions, after, kv_slots, of_rows)
    if max(count, rows):
        with _launch.on_device_of(page_table):
            _place[(max(count, rows),)](
                entries.slots, entries.starts, entries.drafted, state.committed_lens, state.limits,
                state.tokens, state.counts, trees.tokens, trees.parents, trees.depths, trees.ancestors,
                trees.logprobs, trees.num_nodes, page_table, *_columns(sampling), placed.cached_lens,
                placed.kv_lens, placed.table_rows, placed.positions, placed.next_positions, placed.kv_slots,
                *_columns(of_rows), count, rows, state.tokens.shape[1], page_table.shape[1], words,
                PAGE_SIZE=page_size, WORDS=_launch.next_power_of_2(words), BLOCK=_BLOCK, num_warps=1,
                **_launch.dependent(page_table),
            )  # fmt: skip
    return placed


def _columns(one: SamplingTensors) -> tuple[torch.Tensor, ...]:
    columns = (one.temperature, one.top_k, one.top_p, one.min_p, one.seeds, one.choices)
    return tuple(column.contiguous() for column in columns)


@triton.jit(do_not_specialize=["results", "rows", "columns", "pages"])
def _accept(
    starts, captures, table_rows, cached_lens, tokens, parents, num_nodes, chosen, page_table, path,
    num_accepted, packed, feature_rows, feature_slots, feature_places, committed_lens, slot_tokens, counts,
    results, rows, columns, pages,
    PAGE_SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    entry = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    if (entry < rows) & (entry >= tl.load(starts + results)):
        # The program's number is also the number of a row behind the rows of all real entries.
        tl.store(feature_rows + entry + offset, tl.zeros((BLOCK,), tl.int64), mask=offset == 0)
        tl.store(feature_slots + entry + offset, tl.full((BLOCK,), -1, tl.int64), mask=offset == 0)
        tl.store(feature_places + entry + offset, tl.full((BLOCK,), -1, tl.int64), mask=offset == 0)
    if entry < results:
        start = tl.load(starts + entry)
        width = tl.load(starts + entry + 1) - start
        slot = tl.load(table_rows + entry).to(tl.int64)
        cached = tl.load(cached_lens + entry)
        nodes = tl.load(num_nodes + entry)
        live = slot >= 0
        # 1. Walk the tree, up to R tokens. Parents precede children, so a single scan finds the path.
        column = tl.arange(0, COLUMNS)  # index on the path
        wanted = tl.load(chosen + start, mask=live, other=-1).to(tl.int32)
        walked = tl.where((column == 0) & live, 0, -1)
        said = tl.where(column == 0, wanted, -1)
        at, accepted = nodes * 0, nodes * 0
        scanned = tl.where(live & (nodes > 1), nodes, 0)
        for first in range(0, scanned, BLOCK):
            node = first + offset
            real = (node < scanned) & (node > 0)
            token = tl.load(tokens + start + node, mask=real, other=-1)
            parent = tl.load(parents + start + node, mask=real, other=-1)
            after = tl.load(chosen + start + node, mask=real, other=-1).to(tl.int32)
            fits = real & (parent == at) & (token == wanted)
            child = tl.min(tl.where(fits, node, scanned), 0)
            while (child < scanned) & (accepted < columns - 1):
                at = child
                accepted += 1
                wanted = tl.sum(tl.where(node == at, after, 0), 0)
                walked = tl.where(column == accepted, at, walked)
                said = tl.where(column == accepted, wanted, said)
                fits = real & (node > at) & (parent == at) & (token == wanted)
                child = tl.min(tl.where(fits, node, scanned), 0)
        # 2. Locate the feature rows of the path.
        captured = live & (tl.load(captures + entry) > 0)
        stored = captured & (column <= accepted)
        index = cached + column
        page = tl.load(page_table + slot * pages + index // PAGE_SIZE, mask=stored, other=0).to(tl.int64)
        committed = tl.load(committed_lens + slot, mask=live, other=0)
        if PDL:
            gdc_launch_dependents()
        tl.store(feature_rows + start + column, (start + walked).to(tl.int64), mask=stored)
        tl.store(feature_slots + start + column, page * PAGE_SIZE + index % PAGE_SIZE, mask=stored)
        tl.store(feature_places + start + column, slot * columns + column, mask=stored)
        behind = tl.where(captured, accepted + 1, 0)
        for first in range(0, width, BLOCK):
            node = first + offset
            unused = (node < width) & (node >= behind)
            tl.store(feature_rows + start + node, tl.zeros((BLOCK,), tl.int64), mask=unused)
            tl.store(feature_slots + start + node, tl.full((BLOCK,), -1, tl.int64), mask=unused)
            tl.store(feature_places + start + node, tl.full((BLOCK,), -1, tl.int64), mask=unused)
        # 3. Store the result for the host.
        inside = column < columns
        taken = tl.where(live, accepted, -1)
        out = packed + entry * (2 + 2 * columns)
        tl.store(num_accepted + entry, taken)
        tl.store(path + entry * columns + column, walked, mask=inside)
        tl.store(out, taken)
        tl.store(out + 1, nodes)
        tl.store(out + 2 + column, walked, mask=inside)
        tl.store(out + 2 + columns + column, said, mask=inside)
        # 4. Prepare the slot's next round; a slot with a poisoned row becomes idle.
        count = tl.where(wanted >= 0, accepted + 1, 0)
        kept = tl.where(column < count, said, 0)
        tl.store(slot_tokens + slot * columns + column, kept, mask=inside & live)
        tl.store(counts + slot, count, mask=live)
        tl.store(committed_lens + slot, committed + count, mask=live)


def accept_entries(
    state: SlotState,
    entries: Entries,
    trees: PackedTrees,
    placed: PlacedEntries,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    results: int,
) -> AcceptedEntries:
    rows, columns, device = trees.tokens.shape[0], state.tokens.shape[1], trees.tokens.device
    accepted = AcceptedEntries(
        path=_launch.empty((results, columns), torch.int32, device),
        num_accepted=_launch.empty((results,), torch.int32, device),
        packed=_launch.empty((results, 2 + 2 * columns), torch.int32, device),
        feature_rows=_launch.empty((rows,), torch.int64, device),
        feature_slots=_launch.empty((rows,), torch.int64, device),
        feature_places=_launch.empty((rows,), torch.int64, device),
    )
    if max(results, rows):
        with _launch.on_device_of(chosen):
            _accept[(max(results, rows),)](
                entries.starts, entries.captures, placed.table_rows, placed.cached_lens, trees.tokens,
                trees.parents, trees.num_nodes, chosen.contiguous(), page_table, accepted.path,
                accepted.num_accepted, accepted.packed, accepted.feature_rows, accepted.feature_slots,
                accepted.feature_places, state.committed_lens, state.tokens, state.counts, results, rows,
                columns, page_table.shape[1], PAGE_SIZE=page_size, COLUMNS=_launch.next_power_of_2(columns),
                BLOCK=_BLOCK, num_warps=1, **_launch.dependent(chosen),
            )  # fmt: skip
    return accepted


@triton.jit(
    do_not_specialize=["nodes", "words", "out_words"], do_not_specialize_on_alignment=["num_nodes", "members"]
)
def _pack(
    tokens, parents, depths, ancestors, num_nodes, logprobs, members, starts, out_tokens, out_parents,
    out_depths, out_ancestors, out_logprobs, out_num_nodes, nodes, words, out_words, LOGPROBS: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    member = tl.program_id(0)
    entry = tl.load(members + member)
    if entry >= 0:
        start = tl.load(starts + entry)
        kept = tl.minimum(tl.load(num_nodes + member), tl.load(starts + entry + 1) - start)
        word = tl.arange(0, WORDS)[None, :]
        for first in range(0, kept, BLOCK):
            node = first + tl.arange(0, BLOCK)
            inside = node < kept
            source, target = member * nodes + node, start + node
            token = tl.load(tokens + source, mask=inside, other=0)
            parent = tl.load(parents + source, mask=inside, other=0)
            depth = tl.load(depths + source, mask=inside, other=0)
            known = inside[:, None] & (word < words)
            mask = tl.load(ancestors + source[:, None] * words + word, mask=known, other=0)
            logprob = tl.zeros((BLOCK,), tl.float32)
            if LOGPROBS:
                logprob = tl.load(logprobs + source, mask=inside, other=0.0)
            tl.store(out_tokens + target, token, mask=inside)
            tl.store(out_parents + target, parent, mask=inside)
            tl.store(out_depths + target, depth, mask=inside)
            tl.store(
                out_ancestors + target[:, None] * out_words + word,
                mask,
                mask=inside[:, None] & (word < out_words),
            )
            tl.store(out_logprobs + target, logprob, mask=inside)
        if PDL:
            gdc_launch_dependents()
        tl.store(out_num_nodes + entry, kept)


def pack_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: torch.Tensor,
    logprobs: torch.Tensor | None,
    members: torch.Tensor,
    entries: Entries,
    trees: PackedTrees,
) -> None:
    rows, nodes = tokens.shape
    words, out_words = ancestors.shape[2], trees.ancestors.shape[1]
    if rows * nodes == 0:
        return
    with _launch.on_device_of(tokens):
        _pack[(rows,)](
            tokens.contiguous(), parents.contiguous(), depths.contiguous(), ancestors.contiguous(),
            num_nodes.contiguous(), trees.logprobs if logprobs is None else logprobs.contiguous(), members,
            entries.starts, trees.tokens, trees.parents, trees.depths, trees.ancestors, trees.logprobs,
            trees.num_nodes, nodes, words, out_words, LOGPROBS=logprobs is not None,
            WORDS=_launch.next_power_of_2(max(words, out_words)), BLOCK=_BLOCK, num_warps=1,
            **_launch.dependent(tokens),
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["slot_columns", "columns", "width"],
    do_not_specialize_on_alignment=["members", "out_committed", "out_counts", "out_choices"],
)
def _gather(
    slots, members, committed_lens, limits, tokens, counts, temperature, seeds, choices, features,
    slot_stride, row_stride, out_committed, out_counts, out_tokens, out_temperature, out_seeds, out_choices,
    out_features, out_stride, out_row_stride, slot_columns, columns, width, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    member = tl.load(members + row)
    slot = tl.load(slots + member, mask=member >= 0, other=-1)
    at = tl.maximum(slot, 0).to(tl.int64)
    if part == 0:
        count, committed = tl.load(counts + at), tl.load(committed_lens + at)
        live = (slot >= 0) & (count > 0) & (committed < tl.load(limits + at))
        column = tl.arange(0, COLUMNS)
        token = tl.load(tokens + at * slot_columns + column, mask=live & (column < columns), other=0)
        heat, seed, choice = tl.load(temperature + at), tl.load(seeds + at), tl.load(choices + at)
        if PDL:
            gdc_launch_dependents()
        tl.store(out_committed + row, tl.where(live, committed, 1))
        tl.store(out_counts + row, tl.where(live, tl.minimum(count, columns), 0))
        tl.store(out_tokens + row * columns + column, token, mask=column < columns)
        tl.store(out_temperature + row, heat)
        tl.store(out_seeds + row, seed)
        tl.store(out_choices + row, choice)
    else:
        place = (part - 1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < columns * width
        line, across = place // width, place % width
        value = tl.load(features + at * slot_stride + line * row_stride + across, mask=inside)
        if PDL:
            gdc_launch_dependents()
        out = out_features + row.to(tl.int64) * out_stride
        tl.store(out + line * out_row_stride + across, value.to(out_features.dtype.element_ty), mask=inside)


def gather_group(
    state: SlotState,
    features: torch.Tensor,
    sampling: SamplingTensors,
    members: torch.Tensor,
    entries: Entries,
    group: GroupRows,
) -> None:
    (rows, columns), width = group.tokens.shape, features.shape[2]
    if rows == 0:
        return
    with _launch.on_device_of(members):
        _gather[(rows, 1 + _launch.ceil_div(columns * width, _FEATURE_BLOCK))](
            entries.slots, members, state.committed_lens, state.limits, state.tokens, state.counts,
            sampling.temperature.contiguous(), sampling.seeds.contiguous(), sampling.choices.contiguous(),
            features, features.stride(0), features.stride(1), group.committed_lens, group.counts,
            group.tokens, group.temperature, group.seeds, group.choices, group.features,
            group.features.stride(0), group.features.stride(1), state.tokens.shape[1], columns, width,
            COLUMNS=_launch.lanes(columns), BLOCK=_FEATURE_BLOCK, num_warps=4,
            **_launch.dependent(members),
        )  # fmt: skip
