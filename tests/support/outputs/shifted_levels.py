"""A planted fault: the rows of a tree's levels at wrong positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels.round_plan import RowPlan, round_plan
from outrider.services.draft.growth import tree_grower


def shift_levels(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """Shift the positions of the levels. The rows of the extension keep their own."""

    def shifted(*arguments: Any, rows: int, **options: Any) -> RowPlan:
        plan = round_plan(*arguments, rows=rows, **options)
        extended = arguments[0].shape[0] * rows
        moved = torch.cat([plan.positions[:extended], plan.positions[extended:] + by])
        return plan._replace(positions=moved)

    monkeypatch.setattr(tree_grower, "round_plan", shifted)
