"""Checks of head_input, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.head_input import Residual, feature_input, head_input


def check_head_input(
    device: str,
    dtype: torch.dtype,
    count: int,
    hidden: int,
    *,
    norms: tuple[bool, bool],
    gathered: bool,
    residual: Residual,
    guards: Guards,
) -> None:
    generator = torch.Generator().manual_seed(count * hidden)
    made = 3 if gathered else count
    tokens = torch.randint(0, 50, (count,), generator=generator, dtype=torch.int32).to(device)
    embedding = torch.randn(50, hidden, generator=generator).to(device, dtype)
    features = (torch.randn(made, hidden, generator=generator) * 3).to(device, dtype)
    rows = (
        torch.randint(0, made, (count,), generator=generator, dtype=torch.int32).to(device)
        if gathered
        else None
    )
    weights = [
        (1 + torch.randn(hidden, generator=generator) / 4).to(device, dtype) if norm else None
        for norm in norms
    ]
    with reference_version():
        expected = head_input(tokens, embedding, features, rows, *weights, 1e-5, residual)
    guarded = [
        None if tensor is None else guards.put(tensor)
        for tensor in (tokens, embedding, features, rows, *weights)
    ]
    with triton_version(guards):
        actual = head_input(*guarded, 1e-5, residual)  # type: ignore[arg-type]
    exact = not any(norms)
    tolerance = 0.0 if exact else {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for have, want in zip(actual, expected, strict=True):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have, want, atol=tolerance, rtol=tolerance)
    if weights[1] is not None:
        alone = (features, rows, weights[1])
        with triton_version(guards):
            feature, kept = feature_input(
                *(None if part is None else guards.put(part) for part in alone), 1e-5, residual
            )  # type: ignore[arg-type]
        assert torch.equal(feature, actual[0][:, hidden:])
        assert torch.equal(kept, actual[1])
        with reference_version():
            for have, want in zip(
                feature_input(*alone, 1e-5, residual), (expected[0][:, hidden:], expected[1]), strict=True
            ):
                assert torch.equal(have, want)
    if residual is Residual.FEATURE:
        wanted = features if rows is None else features[rows.long()]
        assert torch.equal(actual[1], wanted)
