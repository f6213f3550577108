"""Weights stored in FP8: close to the original weights, half their size, and refused where unsupported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.family_models import Sequences, save

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.decoder import LM_HEAD, Decoder
from outrider.shared.nn.layers import linear
from outrider.shared.nn.layers.fp8_linear import Fp8Linear, quantize_weight
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.open import load_decoder


def test_products_are_near_those_of_the_wide_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = (
        torch.randn(48, 64, generator=generator).bfloat16(),
        torch.randn(48, generator=generator).bfloat16(),
    )
    x, residual = (
        torch.randn(5, 64, generator=generator).bfloat16(),
        torch.randn(5, 48, generator=generator).bfloat16(),
    )
    wide, narrow = Linear(weight, bias), Fp8Linear.of(Linear(weight, bias))
    for got, want in ((narrow(x), wide(x)), (narrow.plus(residual, x), wide.plus(residual, x))):
        assert (
            float((got - want).float().norm() / want.float().norm()) < 0.04
        )  # three mantissa bits: the relative error is at most 1/16
    assert narrow.nbytes == 48 * 64 + 48 * 4


def test_each_row_has_its_own_scale() -> None:
    weight = torch.ones(3, 8) * torch.tensor([1e-4, 1.0, 0.0])[:, None]
    quantised, scales = quantize_weight(weight)
    torch.testing.assert_close(quantised.float() * scales[:, None], weight)


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    return load_decoder(save("llama", tmp_path))


def test_a_decoder_is_near_itself_in_fp8(decoder: Decoder) -> None:
    want, _ = Sequences(decoder, 1).run([0], [[1, 2, 3, 4]])
    nbytes, fingerprint = decoder.weight_bytes, decoder.fingerprint
    decoder.quantize_fp8()
    got, _ = Sequences(decoder, 1).run([0], [[1, 2, 3, 4]])
    # Each weight is off by about 1/30, and random models amplify errors.
    assert 0.0 < float((got - want).norm() / want.norm()) < 0.25
    assert decoder.weight_bytes < 0.6 * nbytes
    assert decoder.fingerprint != fingerprint, "features stored for the wide model must not match"


def test_logits_come_from_a_rounded_copy_of_the_head(decoder: Decoder) -> None:
    hidden = torch.randn(3, decoder.config.hidden_size, generator=torch.Generator().manual_seed(2))
    wide, lent, nbytes = decoder.logits(hidden), decoder.weight(LM_HEAD), decoder.weight_bytes
    layers = sum(layer.attention.nbytes + layer.mlp.nbytes for layer in decoder.layers)
    decoder.quantize_fp8()
    weight, scales = quantize_weight(lent)
    torch.testing.assert_close(decoder.logits(hidden), hidden @ (weight.float() * scales[:, None]).T)
    assert not torch.equal(decoder.logits(hidden), wide)
    assert decoder.weight(LM_HEAD) is lent, "a draft borrows the head as it was loaded"
    narrow = sum(layer.attention.nbytes + layer.mlp.nbytes for layer in decoder.layers)
    assert decoder.weight_bytes == nbytes - layers + narrow + weight.nbytes + scales.nbytes


def test_quantized_layers_are_not_quantized_again(decoder: Decoder) -> None:
    decoder.quantize_fp8()
    with pytest.raises(ConfigurationError, match="quantization fp8"):
        decoder.quantize_fp8()


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v2"])
def test_other_layers_are_refused(case: str, tmp_path: Path) -> None:
    path = save(case, tmp_path)
    with pytest.raises(ConfigurationError, match="dense decoder"):
        load_decoder(path).quantize_fp8()
