"""Alternative spellings of one head's config.json: rotary embeddings, architectures and model types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.head_dialects import assert_computes
from support.models.toy_heads import HIDDEN, VOCAB, base_config, eagle3_tensors, eagle_tensors, write_head
from support.models.toys import make_toy_target

from outrider.services.convert.head import HeadLayout, rewrite_head
from outrider.services.doctor.examine import examine
from outrider.services.doctor.pair import Pair
from outrider.services.draft.algorithm import Algorithm
from outrider.services.draft.heads.registry import HeadKind, head_kind, load_head

torch.set_num_threads(1)
CPU = torch.device("cpu")
SECTIONS = [
    {"mrope_section": [2, 1, 1], "type": "mrope"},
    {"mrope_section": [2, 1, 1], "rope_type": "default", "type": "mrope"},
]
DYNAMIC = {"type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize("rope_scaling", [DYNAMIC, {"rope_type": "dynamic", "factor": 4.0}, *SECTIONS])
def test_a_rotary_embedding_that_is_plain_in_short_texts_is_read_so(
    rope_scaling: dict[str, Any], tmp_path: Path
) -> None:
    """Dynamic NTK scales only beyond max_position_embeddings; below, only the base matters."""
    config = base_config(architectures=["LlamaForCausalLMEagle"], rope_scaling=rope_scaling, rope_theta=700.0)
    head = load_head(write_head(tmp_path / "head", config, eagle_tensors()), CPU, torch.float32)
    plain = load_head(
        write_head(tmp_path / "plain", config | {"rope_scaling": None}, eagle_tensors()), CPU, torch.float32
    )
    positions = torch.arange(2048)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(head.rotation(positions), plain.rotation(positions), strict=True)
    )


def test_a_dynamic_rotary_embedding_is_told_and_kept_by_conversion(tmp_path: Path) -> None:
    target = make_toy_target(tmp_path / "target", vocab_size=VOCAB, hidden_size=HIDDEN)
    head = write_head(tmp_path / "head", base_config(rope_scaling=DYNAMIC), eagle_tensors())
    findings = examine(Pair(target, head, Algorithm.AUTO, CPU, torch.float32)).findings
    assert any(finding.field == "rope_scaling" and "beyond" in finding.message for finding in findings)
    rewrite_head(head, tmp_path / "official", HeadLayout.EAGLE)
    assert json.loads((tmp_path / "official" / "config.json").read_text())["rope_scaling"] == DYNAMIC


def test_an_architecture_may_be_written_without_a_list(tmp_path: Path) -> None:
    target = make_toy_target(tmp_path / "target", vocab_size=VOCAB, hidden_size=HIDDEN)
    config = base_config(architectures="LlamaForCausalLMEagle3", draft_vocab_size=24)
    head = write_head(tmp_path / "head", config, eagle3_tensors())
    assert head_kind(head) is HeadKind.EAGLE3
    assert load_head(head, CPU, torch.float32).algorithm == "EAGLE3"
    assert examine(Pair(target, head, Algorithm.AUTO, CPU, torch.float32)).exit_code == 0


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_5_vl_text"])
def test_a_head_for_qwen_vl_is_read_by_its_own_name(model_type: str, tmp_path: Path) -> None:
    config = base_config(
        architectures=["Eagle3Qwen2_5vlForCausalLM"], model_type=model_type, rope_scaling=SECTIONS[0]
    )
    tensors = eagle3_tensors(draft_vocab=None)
    head = load_head(write_head(tmp_path / "head", config, tensors), CPU, torch.float32)
    assert_computes(head, {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()})
