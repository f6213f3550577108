"""Fixtures: one supervised stack per transport, shared by all tests that leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.services.stack import Stack, supervised


@pytest.fixture(scope="session", params=["grpc", "ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    """Transport between target and draft."""
    return str(request.param)


@pytest.fixture(scope="session")
def stack(transport: str) -> Iterator[Stack]:
    """A running `outrider up` with the embedded pair; the draft is connected."""
    with supervised("--transport", transport) as running:
        yield running
