"""Trees of every head equal an independent EAGLE-2 tree over the plain head: tokens, parents, scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.draft_reference import reference_tree
from support.models.plain_heads import PlainHead
from support.models.toy_heads import (
    HIDDEN,
    LATENT,
    TARGET_LAYERS,
    VOCAB,
    Tensors,
    base_config,
    eagle3_tensors,
    eagle_tensors,
    with_latent_attention,
    write_head,
)
from support.models.toys import make_toy_target, read_target_tensor
from support.suite.compute_device import DEVICE
from test_draft_tree import CLOSE, PEER, assert_same_tree, follow

from outrider.services.draft.build import build_engine
from outrider.services.draft.settings import DraftSettings
from outrider.shared.spec.tree import DraftShape

EAGLE = base_config(architectures=["LlamaForCausalLMEagle"], head_dim=8)
EAGLE3 = base_config(architectures=["LlamaForCausalLMEagle3"], head_dim=8, draft_vocab_size=24)
TOKEN_MAP = [*range(0, VOCAB, 2), 1, 3]


def calm(tensors: Tensors) -> Tensors:
    """Scale down the layers' outputs.

    Without a final norm, random states would grow until fp32 could not distinguish scores.
    """
    return {
        name: 0.3 * tensor if "o_proj" in name or "down_proj" in name else tensor
        for name, tensor in tensors.items()
    }


HEADS: dict[str, tuple[Mapping[str, Any], Tensors, list[int] | None]] = {
    "EAGLE": (EAGLE, calm(eagle_tensors()), None),
    "EAGLE of two layers": (EAGLE | {"num_hidden_layers": 2}, calm(eagle_tensors(layers=2)), None),
    "EAGLE with a token map": (EAGLE, calm(eagle_tensors()), TOKEN_MAP),
    "EAGLE-3 of two layers": (EAGLE3 | {"num_hidden_layers": 2}, eagle3_tensors(layers=2), None),
    "EAGLE-3 with norm_output": (EAGLE3 | {"norm_output": True}, eagle3_tensors(), None),
    "EAGLE-3 with a window": (EAGLE3 | {"sliding_window": 7}, eagle3_tensors(), None),
    "EAGLE-3 with a window shorter than the tree": (EAGLE3 | {"sliding_window": 3}, eagle3_tensors(), None),
    "EAGLE-3, norm_before_residual": (EAGLE3 | {"norm_before_residual": True}, eagle3_tensors(), None),
    "EAGLE-3 with latent attention": (
        EAGLE3 | {"model_type": "deepseek_v3", **LATENT},
        with_latent_attention(eagle3_tensors(prefix="layers.0.")),
        None,
    ),
    "EAGLE-3 with a token map": (
        EAGLE3 | {"draft_vocab_size": VOCAB},
        eagle3_tensors(draft_vocab=None),
        TOKEN_MAP,
    ),
}
SHAPES = [(1, 4, 5), (4, 1, 5), (3, 3, 10), (5, 4, 16), (6, 6, 40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(
        tmp_path_factory.mktemp("target"), vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=TARGET_LAYERS
    )


@pytest.mark.parametrize("name", HEADS)
def test_trees_equal_an_independent_implementation(name: str, target: Path, tmp_path: Path) -> None:
    config, tensors, token_map = HEADS[name]
    folder = write_head(tmp_path / "head", config, tensors)
    borrowed = {
        key: read_target_tensor(target, key) for key in ("model.embed_tokens.weight", "lm_head.weight")
    }
    plain = PlainHead.read(folder, borrowed)
    given: dict[str, Any] = {
        "draft": folder,
        "target_weights": target,
        "device": str(DEVICE),
        "kv_tokens": 4096,
        "page_size": 3,
    }
    if token_map is not None:
        file = tmp_path / "map.json"
        file.write_text(json.dumps(token_map))
        given["speculative_token_map"] = file
        plain = plain.cut(token_map)
    engine = build_engine(DraftSettings.load(given), DEVICE, torch.float32)
    generator = torch.Generator().manual_seed(21)
    compared = 0
    for shape in SHAPES:
        cases = []
        for session in range(3):
            length = 3 + 6 * session
            tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
            cases.append((tokens, torch.randn(length - 1, HIDDEN, generator=generator)))
            follow(engine, session, *cases[-1], DraftShape(*shape))
        (proposal,) = engine.step().proposals
        for row, (tokens, features) in enumerate(cases):
            expected = reference_tree(plain, tokens, features.double(), *shape)  # type: ignore[arg-type]
            if expected.margin < CLOSE:
                continue
            compared += 1
            assert_same_tree(proposal.trees, row, expected)
            if token_map is not None:
                assert set(expected.tokens[1:]) <= set(token_map)
        engine.drop_peer(PEER)
    engine.check()
    assert compared >= 2 * len(SHAPES)
