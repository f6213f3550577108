"""Triton version of kv_compact: one launch for all planes. `kernels.kv_compact` documents the op.

Rows are moved as integers, so that planes of any dtype and width share the launch. A program moves some
columns of one plane for one sequence. It loads the source rows of all accepted nodes before it stores any
row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch

_UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _compact(
    addresses, page_table, table_stride, table_rows, cached_lens, path, path_stride, num_accepted, columns,
    TABLE_ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr, NODES: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    sequence, plane = tl.program_id(0), tl.program_id(1)
    base = tl.load(addresses + 2 * plane).to(tl.pointer_type(UNIT))
    width = tl.load(addresses + 2 * plane + 1)
    accepted = tl.load(num_accepted + sequence)
    table_row = sequence
    if TABLE_ROWS:
        table_row = tl.load(table_rows + sequence)
        accepted = tl.where(table_row >= 0, accepted, -1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, NODES)
    node = tl.load(path + sequence * path_stride + step, mask=(step <= accepted) & (step < columns), other=-1)
    moved = (node >= 0) & (node != step)
    if tl.max(moved.to(tl.int32), 0) > 0:
        cached = tl.load(cached_lens + sequence)
        source, target = cached + node, cached + step
        table = page_table + table_row.to(tl.int64) * table_stride
        source_page = tl.load(table + source // PAGE_SIZE, mask=moved, other=0).to(tl.int64)
        target_page = tl.load(table + target // PAGE_SIZE, mask=moved, other=0).to(tl.int64)
        source_slot = source_page * PAGE_SIZE + source % PAGE_SIZE
        target_slot = target_page * PAGE_SIZE + target % PAGE_SIZE
        inside = moved[:, None] & (column < width)[None, :]
        rows = tl.load(base + source_slot[:, None] * width + column[None, :], mask=inside)
        if PDL:
            gdc_launch_dependents()
        tl.debug_barrier()  # all warps must load before any warp stores, as destinations may be sources
        tl.store(base + target_slot[:, None] * width + column[None, :], rows, mask=inside)


@functools.lru_cache(maxsize=64)
def _addresses(planes: tuple[tuple[int, int], ...], unit: int, device: torch.device) -> torch.Tensor:
    """Return the address of each plane and the width of its rows in units, as ``[planes, 2] int64``.

    The tensor is on the device. It is cached, because creating it costs a copy from the host.
    """
    return torch.tensor(
        [(address, row_bytes // unit) for address, row_bytes in planes], dtype=torch.int64, device=device
    )


def kv_compact(
    planes: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    cached_lens: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    table_rows: torch.Tensor | None,
) -> None:
    pages, page_size = planes[0].shape[:2]
    sizes = tuple(
        (plane.data_ptr(), plane.numel() // (pages * page_size) * plane.element_size())
        for plane in planes
        if plane.numel()
    )
    if not sizes:
        return
    # Use the widest integer type whose size divides all addresses and row sizes.
    unit = next(
        unit
        for unit in _UNITS
        if all(address % unit == 0 and row_bytes % unit == 0 for address, row_bytes in sizes)
    )
    path = path if path.stride(1) == 1 else path.contiguous()
    columns = path.shape[1]
    nodes = _launch.next_power_of_2(columns)
    block = max(16, 2048 // nodes)
    grid = (
        path.shape[0],
        len(sizes),
        _launch.ceil_div(max(row_bytes for _, row_bytes in sizes) // unit, block),
    )
    with _launch.on_device_of(path):
        _compact[grid](
            _addresses(sizes, unit, path.device), page_table.contiguous(), page_table.shape[1],
            num_accepted if table_rows is None else table_rows.contiguous(), cached_lens.contiguous(), path,
            path.stride(0), num_accepted.contiguous(), columns, TABLE_ROWS=table_rows is not None,
            PAGE_SIZE=page_size, UNIT=_UNITS[unit], NODES=nodes, BLOCK=block, **_launch.dependent(path),
        )  # fmt: skip
