"""`--speculative-token-map` is passed to the process that drafts, and to no other process."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.services.stack.launch import plan_stack
from outrider.services.stack.options import StackOptions
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError

FLAG = "--speculative-token-map /m/freq.pt"


@pytest.mark.parametrize("inproc", [False, True])
def test_the_token_map_goes_to_the_process_that_drafts(inproc: bool) -> None:
    options = StackOptions(target=Path("/m/t"), draft=Path("/m/d"), token_map=Path("/m/freq.pt"))
    plan = plan_stack(options, Path("/run/x"), inproc=inproc)
    drafting = "target" if inproc else "draft"
    assert [child.name for child in plan.children if FLAG in " ".join(child.command)] == [drafting]


def test_a_token_map_for_a_draft_elsewhere_is_refused() -> None:
    settings = TargetSettings.load(
        {"model": "/m/t", "draft": "grpc://host:7002", "speculative_token_map": "/m/freq.pt"}
    )
    with pytest.raises(ConfigurationError, match="outrider serve draft") as caught:
        settings.check()
    assert caught.value.field == "speculative_token_map"
