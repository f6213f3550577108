"""Request fields of REST, written by `scripts/option_sources.py` from the table of options."""

from __future__ import annotations

from pydantic import BaseModel, Field

from outrider.services.gateway.schemas.constraint_types import JsonSchema
from outrider.services.gateway.schemas.field_types import StopStrings, TokenIds


class FormFields(BaseModel):
    """SGLang's fields that restrict the form of the answer."""

    json_schema: str | JsonSchema | None = Field(
        default=None, description="A JSON schema that the answer has to match, as JSON or as text."
    )
    regex: str | None = Field(
        default=None, description="A regular expression that the whole answer has to match."
    )
    ebnf: str | None = Field(default=None, description="A grammar in EBNF that the answer has to follow.")


class SamplingFields(BaseModel):
    """Fields that determine which tokens are chosen, and where an answer ends."""

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
    sampling_seed: int | None = Field(default=None, description="SGLang's name of `seed`.")
    n: int | None = Field(default=None, description="Number of answers to each prompt.")
    stop: StopStrings | None = Field(default=None, description="Texts that end the answer.")
    stop_regex: StopStrings | None = Field(
        default=None, description="Regular expressions. The token that completes a match ends the answer."
    )
    stop_token_ids: TokenIds | None = Field(default=None, description="Tokens that end the answer.")
    ignore_eos: bool | None = Field(
        default=None, description="Whether the answer continues after the model's end-of-sequence tokens."
    )
    no_stop_trim: bool | None = Field(
        default=None, description="Whether the text includes the stop string (SGLang)."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Whether the text leaves out special tokens. Default: true."
    )
    presence_penalty: float | None = Field(
        default=None, description="Subtracted from the logits of tokens that the answer contains; -2 to 2."
    )
    frequency_penalty: float | None = Field(
        default=None, description="Subtracted once per occurrence of a token in the answer; -2 to 2."
    )
    repetition_penalty: float | None = Field(
        default=None, description="Makes tokens of prompt and answer less likely if above 1 (Hugging Face)."
    )
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Token ids and the numbers, -100 to 100, that are added to their logits."
    )
    allowed_token_ids: list[int] | None = Field(
        default=None, description="The only tokens that may be chosen."
    )
    bad_words: list[str] | None = Field(default=None, description="Texts that the answer must not contain.")
