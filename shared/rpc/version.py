"""Version of the draft protocol, which target and draft exchange and check first, in Hello and HelloAck."""

from __future__ import annotations

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.doorbells import Side

PROTOCOL_VERSION = 2
"""Version number. Increment it for any change that the previous release would reject or misread.

Examples: a new message on a stream, another layout of a round's blobs, another meaning of a field. A new
optional field needs no increment.
"""


def check_version(theirs: int, side: Side) -> None:
    """Check the version of a peer.

    Args:
        theirs: The peer's version, or 0 if the peer sent none.
        side: The peer's side: target or draft.

    Raises:
        ProtocolError: The versions differ. The message names the side to update.
    """
    if theirs == PROTOCOL_VERSION:
        return
    here = Side.DRAFT if side is Side.TARGET else Side.TARGET
    older = side if theirs < PROTOCOL_VERSION else here
    raise ProtocolError(
        f"The {side.value} uses version {theirs} of the draft protocol, this {here.value} version "
        f"{PROTOCOL_VERSION}: update the {older.value}, so that both run the same release.",
        field="protocol_version",
    )
