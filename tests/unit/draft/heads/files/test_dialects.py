"""Heads in every published dialect load, and compute the same numbers as an independent implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.head_dialects import BOTH, CPU, DIALECTS, FLAT3, ROWS, SPECFORGE, canonical, run
from support.models.plain_heads import PlainHead
from support.models.toy_heads import (
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    Maker,
    base_config,
    eagle3_tensors,
    eagle_tensors,
    write_head,
)

from outrider.services.draft.heads.eagle3 import Eagle3Head
from outrider.services.draft.heads.registry import HeadKind, head_kind, load_head
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.nn.decoder import DecoderOutput
from outrider.shared.nn.feature_projector import FeatureProjector


@pytest.mark.parametrize("name", DIALECTS)
def test_a_published_dialect_computes_what_the_plain_head_does(name: str, tmp_path: Path) -> None:
    dialect = DIALECTS[name]
    folder = write_head(tmp_path / "head", dialect.config, dialect.tensors, file=dialect.file)
    is_eagle3 = any(key.endswith("hidden_norm.weight") for key in dialect.tensors)
    assert head_kind(folder) is (HeadKind.EAGLE3 if is_eagle3 else HeadKind.EAGLE)
    head = load_head(folder, CPU, torch.float32)
    assert tuple(head.missing()) == dialect.borrowed
    make = Maker(11)
    lent = {key: make.matrix(VOCAB, HIDDEN) for key in BOTH}
    for key in dialect.borrowed:
        head.lend(key, lent[key])
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(1))
    captured = make.matrix(ROWS, max(1, len(dialect.aux)) * dialect.target_hidden)
    spec = head.feature_spec(TargetInfo("t", "f", VOCAB, dialect.target_hidden, TARGET_LAYERS))
    assert spec.aux_layer_ids == dialect.aux
    assert spec.final_hidden == (not dialect.aux)
    projector = FeatureProjector(
        spec, CPU, torch.float32, hidden_size=dialect.target_hidden, num_layers=TARGET_LAYERS
    )
    features = projector(DecoderOutput(hidden=captured, aux=captured if dialect.aux else None))

    weights = canonical(dialect.tensors)
    if not is_eagle3:
        weights.pop("lm_head.weight", None)
    tied = dialect.config.get("tie_word_embeddings")
    lm_head = weights["embed_tokens.weight"] if tied else lent["lm_head.weight"].double()
    plain = PlainHead(
        base_config() | dict(dialect.flat) | {"head_dim": 8},
        weights,
        lent["model.embed_tokens.weight"].double(),
        lm_head,
    )
    raw = captured.double()
    expected = raw if not dialect.aux else plain.project(raw)
    torch.testing.assert_close(features.double(), expected, rtol=1e-4, atol=1e-4)
    scaling = dialect.config.get("rope_scaling")
    if scaling is not None:
        # The positions are far below the original context. The rope's own tests check the scaled frequencies.
        assert isinstance(head, Eagle3Head)
        assert head.config.layer.rope.factor == scaling["factor"]
        return
    wanted = plain.states(
        tokens, expected, torch.arange(ROWS), torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    )
    states, logits = run(head, tokens, features)
    torch.testing.assert_close(states.double(), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits.double(), plain.logits(wanted), rtol=1e-3, atol=1e-3)
    assert torch.equal(head.vocabulary.target_ids(CPU), plain.ids)


def test_the_algorithm_is_named_for_what_the_tensors_are(tmp_path: Path) -> None:
    assert (
        load_head(write_head(tmp_path / "a", base_config(), eagle_tensors()), CPU, torch.float32).algorithm
        == "EAGLE"
    )
    assert (
        load_head(write_head(tmp_path / "b", FLAT3, eagle3_tensors()), CPU, torch.float32).algorithm
        == "EAGLE3"
    )


def test_a_window_longer_than_the_sequence_changes_nothing(tmp_path: Path) -> None:
    tokens, features = torch.arange(ROWS), Maker(2).matrix(ROWS, HIDDEN)
    embedding = Maker(11).matrix(VOCAB, HIDDEN)

    def logits(name: str, **changes: Any) -> torch.Tensor:
        head = load_head(
            write_head(tmp_path / name, SPECFORGE | changes, eagle3_tensors()), CPU, torch.float32
        )
        head.lend("model.embed_tokens.weight", embedding)
        return run(head, tokens, features)[1]

    full = logits("full")
    torch.testing.assert_close(logits("long", sliding_window=ROWS), full)
    torch.testing.assert_close(logits("off", sliding_window=3, use_sliding_window=False), full)
    short = logits("short", sliding_window=3)
    torch.testing.assert_close(short[:3], full[:3])
    assert not torch.allclose(short[3:], full[3:])
