"""Range of fp16: a residual times a norm's weight may exceed 65504, but no value in a fused stream does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from guards import Guards, triton_version
from layer_cases import EPS, close, reference_version
from support.models.family_models import Sequences, save

from outrider.kernels._dispatch import Backend, force_backend
from outrider.kernels.add_norm import add_sums, embed_rows, normalise, rms_norm
from outrider.kernels.skinny_gemm import project_add
from outrider.kernels.stream import ResidualStream
from outrider.shared.nn.fused import FusedForward
from outrider.shared.nn.layers import linear
from outrider.shared.nn.open import load_decoder

WIDTH = 96
LARGE = 3000.0  # exceeds fp16 when multiplied by the norm's weight


def _rows(count: int) -> torch.Tensor:
    rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
    rows[:, 7] = LARGE
    return rows.half()


def _is_norm(stream: ResidualStream, weight: torch.Tensor) -> None:
    assert stream.sums is None
    close(normalise(stream), rms_norm(stream.residual.float(), weight.float(), EPS), torch.float16)


@pytest.mark.parametrize("backend", list(Backend))
def test_streams_of_few_rows_are_normed_before_they_overflow(backend: Backend) -> None:
    weight = torch.full((WIDTH,), 50.0, dtype=torch.float16)
    residual, parts = _rows(3), torch.randn(2, 3, WIDTH)
    with force_backend(backend):
        _is_norm(add_sums(parts, residual, weight, EPS), weight)
        _is_norm(embed_rows(torch.tensor([2, 0, 1]), residual, weight, EPS), weight)


def test_a_product_that_is_added_is_normed_too() -> None:
    guards = Guards()
    weight = torch.full((WIDTH,), 50.0, dtype=torch.float16)
    x, matrix = torch.randn(3, 64).half(), torch.randn(WIDTH, 64).half()
    with reference_version():
        expected = project_add(x, matrix, _rows(3), weight, EPS)
    with triton_version(guards):
        stream = project_add(x, matrix, guards.put(_rows(3)), weight, EPS)
    close(stream.residual, expected.residual, torch.float16)
    _is_norm(stream, weight)


def test_a_decoder_with_large_norms_in_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused passes are close to the layers' own operations, which norm before they multiply."""
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    decoder = load_decoder(save("llama", tmp_path), dtype=torch.float16)
    with torch.inference_mode():
        decoder.embedding[:, 5] = LARGE
        # One column is too large before its norm, and no product uses it: even an infinity there must not
        # spread.
        for layer in decoder.layers:
            for norm, product in (
                (layer.input_norm, layer.attention.qkv),
                (layer.post_attention_norm, layer.mlp.gate_up),
            ):
                norm.weight[5] = 50.0
                product.weight[:, 5] = 0.0
    rows = [[1, 2, 3, 40, 5]]
    want, _ = Sequences(decoder, 1).run([0], rows)
    decoder.fused = FusedForward(
        decoder.layers, decoder.embedding, decoder.norm, linear.Linear(decoder.lm_head)
    )
    with force_backend(Backend.TRITON):
        got, _ = Sequences(decoder, 1, backend="triton").run([0], rows)
    close(got, want, torch.float16)
