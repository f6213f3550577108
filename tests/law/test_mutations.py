"""Mistakes that speculative decoding hides: the output stays correct, but the accept length drops.

Each test plants one mistake in a trained head and checks that the accept length drops.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import trained_heads
from support.models.trained_heads import AUX, prompts, served_accept_length, trained_target
from support.outputs.shifted_levels import shift_levels

from outrider.services.draft.heads.files import eagle3_keys
from outrider.services.draft.vocab import DraftVocabulary

pytestmark = pytest.mark.xdist_group("mutations")

SHAPE = (4, 2, 8)
COUNT = 18
LOSS = 0.95
"""A mistake must cost at least 5 % of the accept length."""

Tensors = dict[str, torch.Tensor]


def changed(
    folder: Path, tmp_path: Path, tensors: Callable[[Tensors], Tensors] = lambda given: given, **config: Any
) -> Path:
    """Return a copy of a head with changed tensors or a changed configuration."""
    copy = tmp_path / "changed"
    shutil.copytree(folder, copy)
    file = copy / "model.safetensors"
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors(load_file(str(file))).items()}, str(file)
    )
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | config))
    return copy


def accept_length(folder: Path, starts: Sequence[Sequence[int]] | None = None) -> float:
    return served_accept_length(folder, trained_target(), SHAPE, starts or prompts(), COUNT)


def assert_costs(mistaken: float, right: float) -> None:
    print(f"accept length {right:.3f}, with the mistake {mistaken:.3f}")
    assert mistaken < LOSS * right


@pytest.mark.parametrize("by", [-1, 1])
def test_aux_layers_shifted_by_one_are_noticed(by: int, tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [layer + by for layer in AUX]}
    assert_costs(
        accept_length(changed(trained_heads.eagle3(), tmp_path, eagle_config=ids)),
        accept_length(trained_heads.eagle3()),
    )


def test_offsets_read_as_target_ids_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = accept_length(trained_heads.eagle3())

    def absolute(d2t: torch.Tensor, _: torch.Tensor | None, size: int) -> DraftVocabulary:
        return DraftVocabulary(len(d2t), size, d2t - torch.arange(len(d2t), device=d2t.device))

    monkeypatch.setattr(eagle3_keys.DraftVocabulary, "from_tensors", staticmethod(absolute))
    assert_costs(accept_length(trained_heads.eagle3()), right)


@pytest.mark.parametrize(
    ("make", "name"), [(trained_heads.eagle2, "fc.weight"), (trained_heads.eagle3, "_proj.weight")]
)
def test_a_swapped_order_of_embedding_and_feature_is_noticed(
    make: Callable[[], Path], name: str, tmp_path: Path
) -> None:
    first_layer = "fc.weight" if name == "fc.weight" else "layers.0.self_attn."

    def swap(tensors: Tensors) -> Tensors:
        keys = [key for key in tensors if key.startswith(first_layer) and "o_proj" not in key]
        return tensors | {key: torch.cat(tensors[key].chunk(2, 1)[::-1], 1) for key in keys}

    assert_costs(accept_length(changed(make(), tmp_path, swap)), accept_length(make()))


@pytest.mark.parametrize("by", [-1, 1])
def test_levels_one_position_off_are_noticed(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses motifs, which can be continued only by their positions."""
    motifs = [start for start in prompts(18) if start[0] == 2]
    right = accept_length(trained_heads.eagle3(), motifs)
    shift_levels(monkeypatch, by)
    assert_costs(accept_length(trained_heads.eagle3(), motifs), right)


def test_another_base_of_the_rotation_is_noticed(tmp_path: Path) -> None:
    motifs = [start for start in prompts(18) if start[0] == 2]
    other = changed(trained_heads.eagle3(), tmp_path, rope_theta=500000.0)
    assert_costs(accept_length(other, motifs), accept_length(trained_heads.eagle3(), motifs))


def test_a_dropped_bias_is_noticed(tmp_path: Path) -> None:
    head = trained_heads.eagle2()
    without = changed(
        head,
        tmp_path,
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "fc.bias"},
        bias=False,
    )
    assert_costs(accept_length(without), accept_length(head))


def test_a_missing_fc_norm_is_noticed(tmp_path: Path) -> None:
    head = trained_heads.eagle3_deep()
    assert_costs(accept_length(changed(head, tmp_path, fc_norm=False)), accept_length(head))
