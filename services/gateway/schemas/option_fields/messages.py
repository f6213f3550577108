"""Request fields of REST, written by `scripts/option_sources.py` from the table of options."""

from __future__ import annotations

from pydantic import BaseModel, Field

from outrider.services.gateway.schemas.option_fields.speculation import SpeculationOptions


class MessagesFields(BaseModel):
    """Fields of ``/v1/messages``."""

    stream: bool | None = Field(default=None, description="Whether the reply is a stream.")
    max_tokens: int = Field(description="The largest number of tokens of the answer.")
    temperature: float | None = Field(
        default=None,
        description="The logits are divided by this number, 0 to 2. With 0, the most likely token is chosen.",
    )
    top_k: int | None = Field(
        default=None,
        description="Choose among this many of the most likely tokens; -1 or 0: among all tokens.",
    )
    top_p: float | None = Field(
        default=None,
        description="Choose among the most likely tokens that together have at least this probability.",
    )
    min_p: float | None = Field(
        default=None,
        description="Drop tokens whose probability is below this fraction of the highest probability.",
    )
    seed: int | None = Field(default=None, description="Seed of the sampling noise, a 64-bit integer.")
    stop_sequences: list[str] | None = Field(default=None, description="Texts that end the answer.")
    speculation: SpeculationOptions | None = Field(
        default=None, description="Whether the server drafts, and how large the trees are."
    )
