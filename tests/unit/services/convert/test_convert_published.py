"""`outrider convert head` on every published dialect: the converted head computes the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.head_dialects import DIALECTS, ROWS, Dialect, run
from support.models.toy_heads import HIDDEN, TARGET_LAYERS, VOCAB, Maker, write_head
from test_convert import convert

from outrider.services.draft.heads.registry import load_head
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import CheckpointError

CPU = torch.device("cpu")
OFFICIAL = (
    "EAGLE-1 of Llama 2, .bin",
    "EAGLE-2 of Llama 3",
    "EAGLE of Qwen2",
    "EAGLE as SGLang",
    "EAGLE of two layers",
    "EAGLE-3, official",
    "EAGLE-3, safetensors in shards",
    "EAGLE-3, Eagle3LlamaForCausalLM",
    "EAGLE-3 for a wider target",
)
"""Published dialects that the official code supports."""


def computed(folder: Path, published: Dialect) -> tuple[object, ...]:
    """Return everything that defines a head's behaviour on a fixed input.

    Covers its borrowed tensors, captured layers, projector, states, logits and vocabulary.
    """
    head = load_head(folder, CPU, torch.float32)
    make = Maker(11)
    lent = {name: make.matrix(VOCAB, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    borrowed = tuple(head.missing())
    for name in borrowed:
        head.lend(name, lent[name])
    spec = head.feature_spec(TargetInfo("t", "f", VOCAB, published.target_hidden, TARGET_LAYERS))
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(1))
    states, logits = run(head, tokens, make.matrix(ROWS, head.hidden_size))
    projector = {name: tensor.tolist() for name, tensor in sorted(spec.projector.items())}
    ids = head.vocabulary.target_ids(CPU).tolist()
    return (
        borrowed,
        tuple(spec.aux_layer_ids),
        spec.final_hidden,
        projector,
        states.tolist(),
        logits.tolist(),
        ids,
    )


@pytest.mark.parametrize("name", DIALECTS)
def test_every_published_dialect_computes_the_same_afterwards(tmp_path: Path, name: str) -> None:
    published = DIALECTS[name]
    source = write_head(tmp_path / "head", published.config, published.tensors, file=published.file)
    before = computed(source, published)
    convert(source, tmp_path / "ours")
    assert computed(tmp_path / "ours", published) == before
    if name in OFFICIAL:
        convert(source, tmp_path / "official", "eagle")
        assert computed(tmp_path / "official", published) == before
    else:
        with pytest.raises(CheckpointError, match="The official EAGLE layout does not support this"):
            convert(source, tmp_path / "official", "eagle")
