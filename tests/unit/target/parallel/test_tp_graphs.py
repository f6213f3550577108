"""Tests that a sharded model drops its graphs before its ranks separate, unless the group is broken.

In a broken group, dropping graphs could wait forever, because the device may never finish.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.services.target.parallel.watchdog import forget_graphs
from outrider.shared.base.errors import UnavailableError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.parallel.lead_decoder import LeadDecoder


def spread(failure: UnavailableError | None) -> LeadDecoder:
    decoder = LeadDecoder.__new__(LeadDecoder)
    lead: Any = SimpleNamespace(failure=failure)
    decoder.connect(lead, read_head=lambda: pytest.fail("the head must not be read"))
    return decoder


@pytest.mark.parametrize(
    ("decoder", "dropped"),
    [(spread(None), 1), (spread(UnavailableError("a rank is lost")), 0), (Decoder.__new__(Decoder), 0)],
    ids=["spread", "broken", "whole"],
)
def test_graphs_are_dropped_where_nccl_would_wait_for_them(decoder: Decoder, dropped: int) -> None:
    cleared: list[None] = []
    graphs: Any = SimpleNamespace(clear=lambda: cleared.append(None))
    forget_graphs(graphs, decoder)
    assert len(cleared) == dropped
