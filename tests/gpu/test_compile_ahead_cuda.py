"""Tests on a GPU of kernels that a rehearsal missed: compiled in the background, with unchanged outputs."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from triton import knobs

from outrider.kernels import ahead
from outrider.kernels.add_norm import reference, rms_norm
from outrider.kernels.ahead import compile_ahead
from outrider.kernels.ahead.pool import CompilerPool

pytestmark = pytest.mark.gpu
WIDTHS = (80, 144, 272, 528)  # No other test has kernels of these widths.


def test_what_is_missing_is_compiled_before_it_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Workers of an earlier test would write to the cache folder of that test.
    monkeypatch.setattr(ahead, "_pool", functools.cache(CompilerPool))
    xs = [torch.randn(5, width, device="cuda") for width in WIDTHS]

    def work(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, torch.ones(x.shape[1], device="cuda"), 1e-5)

    told: list[tuple[int, int]] = []
    compiled = compile_ahead(
        torch.device("cuda"),
        [lambda x=x: work(x) for x in xs],
        lambda done, total: told.append((done, total)),
    )
    assert compiled >= 1
    assert told[-1] == (compiled, compiled)
    hits: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_more: hits.append(cache_hit))
    for x in xs:
        torch.testing.assert_close(
            work(x),
            reference.rms_norm(x, torch.ones(x.shape[1], device="cuda"), 1e-5, None),
            atol=1e-5,
            rtol=1e-5,
        )
    assert hits
    assert all(hits)
    assert compile_ahead(torch.device("cuda"), [lambda x=x: work(x) for x in xs]) == 0
