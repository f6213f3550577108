"""Features for a draft head: the target applies the head's norms and projection, and rejects a wrong head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.decoder import DecoderOutput
from outrider.shared.nn.feature_projector import FeatureProjector
from outrider.shared.spec.drafter import FeatureSpec

HIDDEN, LAYERS, SIZE, EPS = 16, 8, 12, 1e-3
AUX = (1, 3, 4)


def output() -> DecoderOutput:
    torch.manual_seed(0)
    return DecoderOutput(hidden=torch.randn(5, HIDDEN), aux=torch.randn(5, 3 * HIDDEN))


def project(projector: dict[str, torch.Tensor], **spec: Any) -> torch.Tensor:
    settings = {"aux_layer_ids": AUX, "feature_size": SIZE, "norm_eps": EPS, **spec}
    return FeatureProjector(
        FeatureSpec(projector=projector, **settings),
        "cpu",
        torch.float32,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
    )(output())


def test_fc_projects_the_concatenated_states() -> None:
    fc, bias = torch.randn(SIZE, 3 * HIDDEN), torch.randn(SIZE)
    torch.testing.assert_close(project({"fc.weight": fc}), functional.linear(output().aux, fc))
    torch.testing.assert_close(
        project({"fc.weight": fc, "fc.bias": bias}), functional.linear(output().aux, fc, bias)
    )


def test_each_state_has_its_own_norm() -> None:
    fc, norms = torch.randn(SIZE, 3 * HIDDEN), torch.randn(3, HIDDEN)
    got = project({"fc.weight": fc, **{f"fc_norm.{index}.weight": norms[index] for index in range(3)}})
    states = torch.cat(
        [
            functional.rms_norm(output().aux.chunk(3, -1)[index], (HIDDEN,), norms[index], EPS)
            for index in range(3)
        ],
        -1,
    )
    torch.testing.assert_close(got, functional.linear(states, fc), rtol=1e-4, atol=1e-4)


def test_one_norm_covers_the_concatenation() -> None:
    fc, norm = torch.randn(SIZE, 3 * HIDDEN), torch.randn(3 * HIDDEN)
    want = functional.linear(functional.rms_norm(output().aux, (3 * HIDDEN,), norm, EPS), fc)
    torch.testing.assert_close(
        project({"fc.weight": fc, "input_norm.weight": norm}), want, rtol=1e-4, atol=1e-4
    )


def test_features_may_be_sent_without_projection() -> None:
    assert torch.equal(project({}, feature_size=3 * HIDDEN), output().aux)
    assert torch.equal(project({}, aux_layer_ids=(), final_hidden=True, feature_size=HIDDEN), output().hidden)


@pytest.mark.parametrize(
    ("projector", "spec", "field", "says"),
    [
        ({"fc.weight": (SIZE, 2 * HIDDEN)}, {}, "fc.weight", r"need \[12, 48\]"),
        ({"fc.weight": (SIZE + 1, 3 * HIDDEN)}, {}, "fc.weight", r"need \[12, 48\]"),
        ({"fc.weight": (SIZE, 3 * HIDDEN), "fc.bias": (SIZE + 1,)}, {}, "fc.bias", r"must be \[12\]"),
        (
            {"fc.weight": (SIZE, 3 * HIDDEN), "input_norm.weight": (HIDDEN,)},
            {},
            "input_norm.weight",
            r"needs \[48\]",
        ),
        (
            {"fc.weight": (SIZE, 3 * HIDDEN), "fc_norm.0.weight": (HIDDEN,)},
            {},
            "fc_norm",
            "1 fc_norm weights for 3 aux layers",
        ),
        ({"fc.weight": (SIZE, 3 * HIDDEN), "fc_norm.1.weight": (HIDDEN,)}, {}, "fc_norm.0.weight", "missing"),
        ({}, {}, "feature_size", "48 wide, but the head needs 12"),
        ({}, {"aux_layer_ids": (1, 3, 8)}, "aux_layer_ids", "below the target's 8 layers"),
        ({}, {"aux_layer_ids": (3, 1)}, "aux_layer_ids", "ascending"),
        ({}, {"aux_layer_ids": ()}, "aux_layer_ids", "either aux layers or the final hidden state"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    projector: dict[str, tuple[int, ...]], spec: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        project({name: torch.randn(shape) for name, shape in projector.items()}, **spec)
    assert caught.value.field == field
