"""Names for the plain values that every service passes about."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""Identifies a request in logs, metadata and on the wire; chosen by the client or by the gateway."""

TokenId = NewType("TokenId", int)
"""An index into the target's vocabulary."""

SessionId = NewType("SessionId", int)
"""A sequence that a draft follows; unique within one target process."""
