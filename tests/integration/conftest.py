"""One supervised stack per transport for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.stack import Stack, supervised


@pytest.fixture(scope="session", params=["grpc", "ipc"])
def transport(request: pytest.FixtureRequest) -> str:
    """How the target reaches the draft."""
    return str(request.param)


@pytest.fixture(scope="session")
def stack(transport: str) -> Iterator[Stack]:
    """`outrider up` on the embedded pair; it drafts."""
    with supervised("--transport", transport) as running:
        yield running
