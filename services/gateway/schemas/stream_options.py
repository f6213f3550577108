"""The object `stream_options` of REST requests."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from outrider.services.gateway.schemas.base import OpenModel


class StreamOptions(OpenModel):
    """The `stream_options` object.

    `include_obfuscation` has no effect here. In OpenAI's API, it adds padding against traffic analysis.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="Send the usage so far with every chunk, if include_usage is set."
    )
    include_obfuscation: Any = None
