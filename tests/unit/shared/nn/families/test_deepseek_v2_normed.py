"""DeepSeek-V2 with ``norm_topk_prob``: the weights of the chosen experts sum to one and are not scaled.

DeepSeek's own code does the same. `transformers` ignores the key. These tests therefore wrap the router of
`transformers` and normalise the weights that it returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.family_models import CASES, VOCAB, Sequences, assert_near, reference_logits, save
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

from outrider.shared.nn.open import load_decoder, read_model_config

torch.set_num_threads(1)


@pytest.mark.parametrize("base", ["deepseek-v2-lite", "deepseek-v2"])
def test_logits_equal_a_router_that_normalises(
    base: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, settings = CASES[base]
    case = f"{base}-normed"
    monkeypatch.setitem(
        CASES, case, (name, {**settings, "norm_topk_prob": True, "routed_scaling_factor": 2.5})
    )
    plain = DeepseekV2TopkRouter.forward
    tokens = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    scaled = reference_logits(case, tokens)

    def normed(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, chosen = plain(router, hidden)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    monkeypatch.setattr(DeepseekV2TopkRouter, "forward", normed)
    decoder = load_decoder(save(case, tmp_path))
    logits, _ = Sequences(decoder, 1).run([0], [tokens])
    want = reference_logits(case, tokens)
    assert_near(logits, want)
    assert float((scaled - want).abs().max()) > 1e-2, "without an effect of the key, this test proves nothing"


def test_one_expert_per_token_is_scaled_and_not_normalised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, settings = CASES["deepseek-v2-lite"]
    changed = {**settings, "norm_topk_prob": True, "num_experts_per_tok": 1, "routed_scaling_factor": 2.5}
    monkeypatch.setitem(CASES, "single", (name, changed))
    experts = read_model_config(save("single", tmp_path)).experts
    assert experts is not None
    assert (experts.routing.normalise, experts.routing.scale) == (False, 2.5)
