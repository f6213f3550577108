"""A target that shares a mailbox with the draft must not send states in messages."""

from __future__ import annotations

from unittest import mock

import pytest

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.serving.ipc import MailboxExchange
from outrider.shared.base.errors import ProtocolError


def test_states_in_messages_are_refused() -> None:
    exchange = MailboxExchange(mock.Mock())
    for refused in (
        exchange.state_coming,
        lambda: exchange.state_arrived(draft_pb2.RoundState(rounds=1, number=1)),
        lambda: exchange.keep_state(b""),
    ):
        with pytest.raises(ProtocolError, match="mailbox") as caught:
            refused()
        assert caught.value.field == "message"
