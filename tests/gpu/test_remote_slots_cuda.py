"""Rounds of a remote target on a GPU: groups that change from round to round draft the right trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.drafts.slotted_target import check_many_rounds
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.services.draft.build import build_engine
from outrider.services.draft.settings import DraftSettings

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("graphs", [True, False])
def test_groups_that_change_every_round(tmp_path: Path, graphs: bool) -> None:
    target = make_toy_target(tmp_path / "target")
    values = {
        "draft": make_toy_eagle3(tmp_path / "head", target),
        "target_weights": target,
        "device": str(CUDA),
        "dtype": "float32",
        "kv_tokens": 1024,
        "page_size": 16,
        "max_steps": 8,
        "disable_cuda_graph": not graphs,
    }
    engine = build_engine(DraftSettings.load(values), CUDA, torch.float32)
    peer_slots = check_many_rounds(engine, CUDA, 60)
    assert bool(peer_slots.graphs.keys) == graphs, "sizes that recur must be recorded"
