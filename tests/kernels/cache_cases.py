"""Checks of kv_store and kv_compact, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.kv_compact import kv_compact
from outrider.kernels.kv_store import kv_store


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN poison compares equal to itself."""
    return tensor.contiguous().view(torch.uint8)


def check_kv_store(
    device: str,
    dtype: torch.dtype,
    rows: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    pages: int,
    guards: Guards,
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + dim)
    fused = torch.randn(rows, kv_heads * 3, dim, generator=generator).to(device, dtype)
    # Views with gaps, as of a fused QKV output.
    k, v = (
        fused[:, kv_heads : 2 * kv_heads],
        fused[:, 2 * kv_heads :],
    )
    slots = torch.randperm(pages * page_size, generator=generator)[:rows]
    slots[::4] = -1
    slots = slots.to(device)
    planes = [
        torch.randn(pages, page_size, kv_heads, dim, generator=generator).to(device, dtype) for _ in range(2)
    ]
    expected = [plane.clone() for plane in planes]
    with reference_version():
        kv_store(k, v, expected[0], expected[1], slots)
    actual = [guards.put(plane, "plane") for plane in planes]
    with triton_version(guards):
        kv_store(k, v, actual[0], actual[1], guards.put(slots, "slots"))
    for have, want, before in zip(actual, expected, planes, strict=True):
        assert torch.equal(bits(have), bits(want))
        assert rows <= 1 or not torch.equal(have, before)


def check_kv_compact(
    device: str,
    bs: int,
    columns: int,
    page_size: int,
    widths: list[tuple[torch.dtype, int]],
    guards: Guards,
    *,
    with_table_rows: bool = False,
) -> None:
    generator = torch.Generator().manual_seed(bs * 100 + columns)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    cached = torch.tensor([draw(0, 3 * page_size) for _ in range(bs)], dtype=torch.int32)
    max_pages = (3 * page_size + columns) // page_size + 1
    pages = bs * max_pages + 3
    table = torch.randperm(pages, generator=generator)[: bs * max_pages].view(bs, max_pages).to(torch.int32)
    path = torch.full((bs, columns), -1, dtype=torch.int32)
    accepted = torch.zeros(bs, dtype=torch.int32)
    for b in range(bs):
        length = draw(0, columns) if b else columns - 1
        nodes = (torch.randperm(columns - 1, generator=generator)[:length] + 1).sort().values
        path[b, 0] = 0
        path[b, 1 : 1 + length] = nodes.to(torch.int32)
        accepted[b] = length
    if bs > 2:
        accepted[2] = -1  # stays unchanged
    planes = []
    for dtype, width in widths:
        values = torch.randint(-99, 99, (pages, page_size, width), generator=generator)
        planes.append(values.to(device, dtype))
    arguments = [tensor.to(device) for tensor in (table, cached, path, accepted)]
    if with_table_rows:
        # The sequences' rows lie in any order among other rows; there are more entries than sequences.
        order = torch.randperm(bs + 2, generator=generator)
        tables = torch.zeros(bs + 2, max_pages, dtype=torch.int32).index_copy_(0, order[:bs], table)
        table_rows = order.to(torch.int32)
        if bs > 1:
            table_rows[1], accepted[1] = -1, -1  # stays unchanged; its `num_accepted` argument says otherwise
        rest = [torch.cat((cached, cached[:1].expand(2))), path, arguments[3].cpu().clone(), table_rows]
        arguments = [tensor.to(device) for tensor in (tables, *rest)]
    expected = [plane.clone() for plane in planes]
    with reference_version():
        kv_compact(expected, *arguments)
    # Check the reference itself: move row by row from a copy.
    flat_before, flat_after = planes[0].flatten(0, 1), expected[0].flatten(0, 1).clone()
    truth = flat_before.clone()
    for b in range(bs):
        for i in range(int(accepted[b]) + 1):
            source, target = int(cached[b]) + int(path[b, i]), int(cached[b]) + i
            at = [
                int(table[b, index // page_size]) * page_size + index % page_size
                for index in (source, target)
            ]
            truth[at[1]] = flat_before[at[0]]
    assert torch.equal(truth, flat_after)
    actual = [guards.put(plane, "plane") for plane in planes]
    with triton_version(guards):
        kv_compact(actual, *(guards.put(tensor) for tensor in arguments))
    for have, want in zip(actual, expected, strict=True):
        assert torch.equal(bits(have), bits(want))
