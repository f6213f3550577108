"""Where the trees of the next round come from, and what the draft records for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from outrider.services.target.drafting.exchange_source import ExchangeSource
from outrider.services.target.policy.cost_model import DraftPath
from outrider.shared.spec.resident import GroupSize
from outrider.shared.spec.tree import DraftShape


def source(slots: Any) -> ExchangeSource:
    nothing: Any = None
    step_runner: Any = SimpleNamespace(table=SimpleNamespace(slots=8))
    return ExchangeSource(slots, nothing, step_runner, nothing, nothing)


@pytest.mark.parametrize(("is_open", "path"), [(True, DraftPath.DEVICE), (False, DraftPath.HOST)])
def test_trees_come_through_the_host_while_no_round_can_be_exchanged(is_open: bool, path: DraftPath) -> None:
    assert source(SimpleNamespace(are_open=lambda: is_open)).path is path


def test_the_draft_hears_of_a_size_when_it_is_recorded() -> None:
    slots = mock.Mock()
    record = source(slots).recording(2, DraftShape(3, 1, 60))
    slots.record.assert_not_called()
    record()
    slots.record.assert_called_once_with(GroupSize(2, 4, 4), DraftShape(3, 1, 4))
