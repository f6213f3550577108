"""Checks of a fused decoder layer's ops, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from guards import Guards, reference_version, triton_version
from torch.nn import functional

from outrider.kernels.add_norm import add_sums, embed_rows, normalise, rms_norm
from outrider.kernels.quantize_rows import quantize_rows
from outrider.kernels.rope_store import Lookup, rope_angles, rope_store
from outrider.kernels.silu_mul import silu_mul
from outrider.kernels.skinny_gemm import (
    Method,
    Rotary,
    Tile,
    project,
    project_add,
    project_gated,
    project_normed,
    project_rotated,
)
from outrider.kernels.stream import ResidualStream

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
EPS = 1e-5


class Maker:
    """Maker of random guarded tensors of one dtype on one device."""

    def __init__(self, device: str, dtype: torch.dtype, guards: Guards, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.guards = device, dtype, guards

    def __call__(
        self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, shift: float = 0.0
    ) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator) * scale + shift
        return self.guards.put(values.to(self.device, dtype or self.dtype))

    def stream(self, rows: int, width: int, parts: int) -> ResidualStream:
        """Return a stream whose sums are split unevenly."""
        residual = self(rows, width, scale=3.0)
        shares = torch.rand(parts, rows, generator=self._generator).softmax(0).to(self.device)
        sums = self.guards.put(residual.float().square().sum(-1) * shares)
        return ResidualStream(residual, self.guards.put(residual * self(width, shift=1.0)), sums, EPS)


def narrow(weight: torch.Tensor, guards: Guards) -> dict[str, torch.Tensor]:
    """Return the keyword arguments that pass a weight in FP8."""
    with reference_version():
        quantised, scales = quantize_rows(weight)
    return {"weight": guards.put(quantised), "scales": guards.put(scales)}


def tile_of(x: torch.Tensor, tile: Tile | None) -> Method:
    """Return the method that computes a product with an FP8 weight."""
    return tile.method if tile else Method.DOT if x.shape[0] > 2 else Method.SUM


def rounded(x: torch.Tensor, tile: Tile | None, guards: Guards, fp8: bool) -> torch.Tensor:
    """Return the rows that a product multiplies. Tensor cores round them to FP8 for an FP8 weight."""
    if not (fp8 and tile_of(x, tile) is Method.DOT):
        return x
    with triton_version(guards):  # not the reference, which rounds: the interpreter truncates
        rows, scales = quantize_rows(x)
    return (rows.float() * scales[:, None]).to(x.dtype)


FP8_STEP = 32  # products that one tensor-core instruction of Hopper adds to a sum
FP8_BITS = 14  # bits it keeps of each, counted from the largest (arXiv 2412.19437, section 3.3.2)


def fp8_slack(x: torch.Tensor, given: dict[str, torch.Tensor], tile: Tile | None) -> float:
    """Return the tolerance of sums of FP8 products: six standard deviations of the tensor cores' truncation.

    An instruction truncates each product, and the sum so far, towards zero by up to one unit of the last bit
    that it keeps. The error has the sign of the truncated number, so it is random. Sums in fp32, by other
    kernels or on other devices, are exact in comparison.
    """
    if not (x.is_cuda and "scales" in given and tile_of(x, tile) is Method.DOT):
        return 0.0
    weight = given["weight"].float() * given["scales"][:, None]
    # [rows, out, columns]
    products = functional.pad(x.float()[:, None, :] * weight[None], (0, -x.shape[1] % FP8_STEP))
    largest = products.abs().unflatten(-1, (-1, FP8_STEP)).amax(-1)
    unit = 2.0 ** (torch.frexp(largest)[1] - 1 - FP8_BITS)
    return 6 * float(((FP8_STEP + 1) / 3 * unit.square()).sum(-1).sqrt().amax())


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, slack: float = 0.0) -> None:
    """Compare with the relative tolerance of a dtype plus an absolute slack."""
    bound = TOLERANCE[dtype]
    assert not bool(expected.isnan().any())
    size = max(1.0, float(expected.float().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual.float(), expected.float(), atol=bound * size + slack, rtol=bound)


def same_stream(
    actual: ResidualStream,
    expected: ResidualStream,
    dtype: torch.dtype,
    slack: float = 0.0,
    gain: float = 1.0,
) -> None:
    """Compare streams. `gain` is the largest weight of the next norm."""
    close(actual.residual, expected.residual, dtype, slack)
    with reference_version():
        close(normalise(actual), normalise(expected), dtype, slack * gain * largest_factor(expected))


def largest_factor(stream: ResidualStream) -> float:
    """Return the largest factor that a norm applies, without its weight."""
    factor = stream.inverse_rms()
    return 1.0 if factor is None else float(factor.max())


def check_project(
    device: str,
    dtype: torch.dtype,
    rows: int,
    out: int,
    columns: int,
    tile: Tile | None,
    guards: Guards,
    *,
    fp8: bool = False,
) -> None:
    make = Maker(device, dtype, guards, rows + out)
    x, weight = make(rows, columns + 8)[:, :columns], make(out, columns, scale=columns**-0.5)
    given = narrow(weight, guards) if fp8 else {"weight": weight}
    read = rounded(x, tile, guards, fp8)
    with reference_version():
        expected = project(read, **given)
    with triton_version(guards):
        parts = project(x, **given, tile=tile)
    assert tile is None or parts.dim() == (3 if tile.splits > 1 else 2)
    close(parts.sum(0) if parts.dim() == 3 else parts, expected, dtype, fp8_slack(read, given, tile))


def check_project_normed(
    device: str,
    dtype: torch.dtype,
    rows: int,
    out: int,
    columns: int,
    tile: Tile | None,
    guards: Guards,
    *,
    normed: bool = True,
) -> None:
    make = Maker(device, dtype, guards, rows + out)
    stream, weight = make.stream(rows, columns, 5), make(out, columns, scale=columns**-0.5)
    if not normed:
        stream = ResidualStream(stream.residual, stream.scaled, None, EPS)
    with reference_version():
        expected = project_normed(stream, weight)
    with triton_version(guards):
        parts = project_normed(stream, weight, tile=tile)
    close(parts.sum(0) if parts.dim() == 3 else parts, expected, dtype)


def check_project_add(
    device: str,
    dtype: torch.dtype,
    rows: int,
    width: int,
    columns: int,
    tile: Tile | None,
    guards: Guards,
    *,
    bias: bool = False,
    fp8: bool = False,
) -> None:
    make = Maker(device, dtype, guards, rows + width)
    x, weight, norm_weight = (
        make(rows, columns),
        make(width, columns, scale=columns**-0.5),
        make(width, shift=1.0),
    )
    residual, offset = make(rows, 2 * width)[:, width:], make(width) if bias else None
    captured = make(rows, 3 * width)
    before = captured.clone()
    given = {
        **(narrow(weight, guards) if fp8 else {"weight": weight}),
        "residual": residual,
        "norm_weight": norm_weight,
        "eps": EPS,
    }
    read = rounded(x, tile, guards, fp8)
    with reference_version():
        expected = project_add(read, **given, bias=offset)
    with triton_version(guards):
        stream = project_add(x, **given, bias=offset, out=captured[:, width : 2 * width], tile=tile)
    same_stream(stream, expected, dtype, fp8_slack(read, given, tile), float(norm_weight.abs().max()))
    assert stream.residual.data_ptr() == captured[:, width:].data_ptr()
    before[:, width : 2 * width] = captured[:, width : 2 * width]
    assert bool((captured == before).all())


def check_project_gated(
    device: str, dtype: torch.dtype, rows: int, size: int, width: int, tile: Tile | None, guards: Guards, *,
    bias: bool, gelu: bool,
    normed: bool = True, fp8: bool = False,
) -> None:  # fmt: skip
    make = Maker(device, dtype, guards, rows + size)
    stream = make.stream(rows, width, 5)
    if not normed:
        stream = ResidualStream(stream.residual, stream.scaled, None, EPS)
    weight, offset = make(2 * size, width, scale=width**-0.5), make(2 * size) if bias else None
    given = narrow(weight, guards) if fp8 else {"weight": weight}
    read = replace(stream, scaled=rounded(stream.scaled, tile, guards, fp8))
    slack = fp8_slack(read.scaled, given, tile) * largest_factor(stream)
    with reference_version():
        expected = project_gated(read, **given, bias=offset, gelu=gelu)
        # Error of act(gate) * up from gate and from up. No activation is steeper than 1.2 or exceeds its
        # argument.
        both = (
            functional.linear(read.scaled.float(), weight.float()) * largest_factor(stream)
            if slack
            else torch.zeros(1)
        )
        slack *= 2.2 * (
            float(both.abs().max()) + (float(offset.float().abs().max()) if offset is not None else 0.0)
        )
    with triton_version(guards):
        actual = project_gated(stream, **given, bias=offset, gelu=gelu, tile=tile)
    close(actual, expected, dtype, slack)


def make_lookup(make: Maker, rows: int, columns: int) -> Lookup:
    """Return a lookup in a table with strided rows, with some entries used twice."""
    index = torch.arange(rows, dtype=torch.int32) * 3 % 5
    return Lookup(make(5, columns + 8)[:, 8:], make.guards.put(index.to(make.device)))


def check_project_rotated(
    device: str, dtype: torch.dtype, rows: int, heads: int, kv_heads: int, dim: int, width: int,
    tile: Tile | None, guards: Guards, *,
    bias: bool = False, normed: bool = True, fp8: bool = False,
) -> None:  # fmt: skip
    make = Maker(device, dtype, guards, rows + heads)
    stream = make.stream(rows, width, 5)
    if not normed:
        stream = ResidualStream(stream.residual, stream.scaled, None, EPS)
    columns = (heads + 2 * kv_heads) * dim
    weight, offset = make(columns, width, scale=width**-0.5), make(columns) if bias else None
    given = narrow(weight, guards) if fp8 else {"weight": weight}
    found = make_lookup(make, rows, columns) if bias else None
    angle = torch.rand(rows, 1, dim, generator=torch.Generator().manual_seed(rows)) * 6.0
    cos, sin = (guards.put(turn.to(device, dtype)) for turn in (angle.cos(), angle.sin()))
    planes = [make(-(-rows // 3) + 2, 3, kv_heads, dim) for _ in range(2)]
    expected_planes = [plane.clone() for plane in planes]
    slots = torch.randperm(planes[0].shape[0] * 3)[:rows]
    slots[1::5] = -1
    slots = guards.put(slots.to(device))
    read = replace(stream, scaled=rounded(stream.scaled, tile, guards, fp8))
    with reference_version():
        expected = project_rotated(
            read, rotary=Rotary(cos, sin, *expected_planes, slots), **given, bias=offset, lookup=found
        )
    with triton_version(guards):
        actual = project_rotated(
            stream, rotary=Rotary(cos, sin, *planes, slots), **given, bias=offset, lookup=found, tile=tile
        )
    slack = fp8_slack(read.scaled, given, tile) * largest_factor(stream) * 2**0.5  # a rotation mixes two
    close(actual, expected, dtype, slack)
    for plane, expected_plane in zip(planes, expected_planes, strict=True):
        close(plane, expected_plane, dtype, slack)


def check_quantize_rows(device: str, dtype: torch.dtype, rows: int, width: int, guards: Guards) -> None:
    make = Maker(device, dtype, guards, rows)
    x = make(rows, width + 3, scale=5.0)[:, :width]
    x[rows // 2] = 0.0
    with reference_version():
        expected, expected_scales = quantize_rows(x)
    with triton_version(guards):
        actual, scales = quantize_rows(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0.0)
    wanted, product = x.float(), actual.float() * scales[:, None]
    # Rounding up to a power of two: the interpreter loses the carry and truncates.
    carried = torch.frexp(expected.float())[0].abs() == 0.5
    judged = ~carried if device == "cpu" else torch.ones_like(carried)
    assert bool(((product - wanted).abs()[judged] <= wanted.abs().amax() / 13).all())
    # A division that rounds differently may yield a neighbouring number.
    step = expected.float().abs() / 8 + 2**-9
    assert bool(((actual.float() - expected.float()).abs() <= step)[judged].all())


def check_add_sums(
    device: str, dtype: torch.dtype, rows: int, width: int, splits: int, guards: Guards, *, bias: bool
) -> None:
    make = Maker(device, dtype, guards, rows + width)
    parts = make(splits, rows, width, dtype=torch.float32) if splits > 1 else make(rows, width)
    residual, norm_weight, offset = (
        make(rows, width + 3)[:, :width],
        make(width, shift=1.0),
        make(width) if bias else None,
    )
    with reference_version():
        expected = add_sums(parts, residual, norm_weight, EPS, bias=offset)
    with triton_version(guards):
        stream = add_sums(parts, residual, norm_weight, EPS, bias=offset)
        normed = normalise(stream)
    same_stream(stream, expected, dtype)
    with reference_version():
        close(normed, normalise(expected), dtype)


def check_embed_rows(device: str, dtype: torch.dtype, rows: int, width: int, guards: Guards) -> None:
    make = Maker(device, dtype, guards, rows)
    table, norm_weight = make(50, width), make(width, shift=1.0)
    tokens = guards.put(torch.randint(0, 50, (rows,), dtype=torch.int32).to(device))
    with reference_version():
        expected = embed_rows(tokens, table, norm_weight, EPS)
    with triton_version(guards):
        stream = embed_rows(tokens, table, norm_weight, EPS)
    assert torch.equal(stream.residual, expected.residual)
    same_stream(stream, expected, dtype)


def check_rms_norm(device: str, dtype: torch.dtype, rows: int, width: int, guards: Guards) -> None:
    make = Maker(device, dtype, guards, rows)
    x, weight, pair = make(rows, width + 5)[:, 5:], make(width, shift=1.0), make(rows, 2 * width)
    before = pair.clone()
    with reference_version():
        expected = rms_norm(x, weight, EPS)
    with triton_version(guards):
        assert rms_norm(x, weight, EPS, out=pair[:, width:]).data_ptr() == pair[:, width:].data_ptr()
        close(rms_norm(x, weight, EPS), expected, dtype)
    close(pair[:, width:], expected, dtype)
    assert torch.equal(pair[:, :width], before[:, :width])


def check_silu_mul(
    device: str,
    dtype: torch.dtype,
    rows: int,
    size: int,
    splits: int,
    guards: Guards,
    *,
    bias: bool,
    normed: bool,
) -> None:
    make = Maker(device, dtype, guards, rows + size)
    parts = make(splits, rows, 2 * size, dtype=torch.float32) if splits > 1 else make(rows, 2 * size)
    stream = make.stream(rows, 24, 3) if normed or splits > 1 else None
    if stream is not None and not normed:
        stream = ResidualStream(stream.residual, stream.scaled, None, EPS)
    offset = make(2 * size) if bias else None
    for gelu in (False, True):
        with reference_version():
            expected = silu_mul(parts, stream, bias=offset, gelu=gelu)
        with triton_version(guards):
            actual = silu_mul(parts, stream, bias=offset, gelu=gelu)
        close(actual, expected, dtype)


def check_rope_store(
    device: str, dtype: torch.dtype, rows: int, heads: int, kv_heads: int, dim: int, splits: int,
    guards: Guards, *, bias: bool = False,
    head_norm: bool = False, normed: bool = True,
) -> None:  # fmt: skip
    make = Maker(device, dtype, guards, rows + heads)
    columns = (heads + 2 * kv_heads) * dim
    parts = make(splits, rows, columns, dtype=torch.float32) if splits > 1 else make(rows, columns)
    stream, offset = make.stream(rows, 40, 3) if normed else None, make(columns) if bias else None
    weights = make(heads + kv_heads, dim, shift=1.0) if head_norm else None
    positions = guards.put(torch.randint(0, 100_000, (rows,)).to(device))
    frequencies = guards.put((1e4 ** -(torch.arange(dim) % (dim // 2) * 2 / dim)).to(device))
    planes = [make(-(-rows // 3) + 2, 3, kv_heads, dim) for _ in range(2)]
    slots = torch.randperm(planes[0].shape[0] * 3)[:rows]
    slots[::5] = -1
    slots = guards.put(slots.to(device))
    expected_planes = [plane.clone() for plane in planes]
    found = make_lookup(make, rows, columns) if bias else None
    options = {"stream": stream, "bias": offset, "head_norm": weights, "head_eps": EPS, "lookup": found}
    with reference_version():
        angles = rope_angles(positions, frequencies, 1.25, dtype)
        expected = rope_store(parts, *angles, *expected_planes, slots, **options)
    with triton_version(guards):
        compiled_angles = rope_angles(positions, frequencies, 1.25, dtype)
        actual = rope_store(parts, *angles, *planes, slots, **options)
    for actual_angle, angle in zip(compiled_angles, angles, strict=True):
        torch.testing.assert_close(
            actual_angle.float(), angle.float(), atol=2e-5 if dtype is torch.float32 else 1e-2, rtol=0
        )
    close(actual, expected, dtype)
    for plane, expected_plane in zip(planes, expected_planes, strict=True):
        close(plane, expected_plane, dtype)
