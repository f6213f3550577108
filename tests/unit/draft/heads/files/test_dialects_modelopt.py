"""Heads exported by NVIDIA's ModelOpt: options are honoured, or refused by name if they are unsupported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.head_dialects import assert_computes
from support.models.toy_heads import (
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    Maker,
    Tensors,
    base_config,
    eagle3_tensors,
    eagle_tensors,
    write_head,
)

from outrider.services.convert.head import HeadLayout, rewrite_head
from outrider.services.draft.heads.registry import load_head
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import CheckpointError

CPU = torch.device("cpu")
TARGET = TargetInfo("t", "f", VOCAB, HIDDEN, TARGET_LAYERS)
IDS = "eagle_aux_hidden_state_layer_ids"
WRITTEN = {
    IDS: [],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}
"""The ``eagle_config`` of an export with default settings."""


def config(
    architecture: str = "LlamaForCausalLMEagle3", top: dict[str, Any] | None = None, **section: Any
) -> dict[str, Any]:
    return base_config(architectures=[architecture], draft_vocab_size=24, **(top or {})) | {
        "eagle_config": WRITTEN | section
    }


def canonical(tensors: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("top", [{}, {IDS: []}])
def test_an_empty_list_of_layers_means_the_default_triple(top: dict[str, Any], tmp_path: Path) -> None:
    head = load_head(write_head(tmp_path / "head", config(top=top), eagle3_tensors()), CPU, torch.float32)
    assert head.feature_spec(TARGET).aux_layer_ids == (1, 3, 4)


def test_an_empty_list_does_not_hide_the_layers_that_are_named(tmp_path: Path) -> None:
    head = load_head(
        write_head(tmp_path / "head", config(top={IDS: [2, 4, 5]}), eagle3_tensors()), CPU, torch.float32
    )
    assert head.feature_spec(TARGET).aux_layer_ids == (2, 4, 5)


def test_a_head_without_aux_layers_may_name_an_empty_list(tmp_path: Path) -> None:
    stored = eagle3_tensors(num_aux=1)
    head = load_head(
        write_head(tmp_path / "head", config(use_aux_hidden_state=False), stored), CPU, torch.float32
    )
    spec = head.feature_spec(TARGET)
    assert (spec.aux_layer_ids, spec.final_hidden) == ((), True)


@pytest.mark.parametrize("changes", [{}, {"use_mtp_layernorm": True}])
def test_an_export_computes_what_the_plain_head_does(changes: dict[str, Any], tmp_path: Path) -> None:
    """ModelOpt reads ``use_mtp_layernorm`` only for heads without aux layers."""
    tensors = eagle3_tensors(draft_vocab=None)
    written = config(**changes) | {"draft_vocab_size": VOCAB}
    assert_computes(
        load_head(write_head(tmp_path / "head", written, tensors), CPU, torch.float32), canonical(tensors)
    )


def test_an_export_of_several_layers_computes_what_the_plain_head_does(tmp_path: Path) -> None:
    tensors = eagle3_tensors(layers=2, draft_vocab=None, prefix="layers.0.", inner_norm="input_layernorm")
    written = config("LlamaForCausalLMEagle3Deep", {"num_hidden_layers": 2}) | {"draft_vocab_size": VOCAB}
    head = load_head(write_head(tmp_path / "head", written, tensors), CPU, torch.float32)
    assert_computes(head, tensors, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_input_layernorm_in_first_layer": False}, "use_input_layernorm_in_first_layer"),
        ({"use_last_layernorm": False}, "use_last_layernorm"),
        ({"parallel_draft_step": 4}, "parallel_draft_step"),
        ({"use_aux_hidden_state": False, "use_mtp_layernorm": True}, "use_mtp_layernorm"),
        ({"num_hidden_layers": 2, "next_layer_regular": False}, "next_layer_regular"),
    ],
)
def test_what_an_eagle3_head_does_not_compute_is_refused_by_its_key(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        load_head(write_head(tmp_path / "head", config(**changes), eagle3_tensors()), CPU, torch.float32)
    assert caught.value.field == field


EAGLE1 = {"use_aux_hidden_state": False, "use_last_layernorm": False}


def eagle1_tensors() -> Tensors:
    return eagle_tensors() | {"layers.0.input_layernorm.weight": Maker(31).norm()}


def test_an_eagle1_head_has_the_norm_of_its_first_layer_where_it_says_so(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", config("LlamaForCausalLMEagle", **EAGLE1), eagle1_tensors())
    assert_computes(load_head(folder, CPU, torch.float32), eagle1_tensors())
    without = config("LlamaForCausalLMEagle", **EAGLE1, use_input_layernorm_in_first_layer=False)
    assert_computes(
        load_head(write_head(tmp_path / "without", without, eagle_tensors()), CPU, torch.float32),
        eagle_tensors(),
    )
    rewrite_head(folder, tmp_path / "ours", HeadLayout.OUTRIDER)
    assert_computes(load_head(tmp_path / "ours", CPU, torch.float32), eagle1_tensors())
    with pytest.raises(CheckpointError, match="no such tensor") as caught:
        rewrite_head(folder, tmp_path / "official", HeadLayout.EAGLE)
    assert caught.value.field == "layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("key", "value"), [("use_last_layernorm", True), ("use_mtp_layernorm", True), ("parallel_draft_step", 2)]
)
def test_what_an_eagle1_head_does_not_compute_is_refused_by_its_key(
    key: str, value: object, tmp_path: Path
) -> None:
    written = config("LlamaForCausalLMEagle", **(EAGLE1 | {key: value}))
    with pytest.raises(CheckpointError, match=key) as caught:
        load_head(write_head(tmp_path / "head", written, eagle1_tensors()), CPU, torch.float32)
    assert caught.value.field == key
