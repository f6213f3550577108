"""Request fields for sampling and for the end of answers. Several routes share these fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field


def _one_or_many(value: object) -> object:
    """Accept one string or a list, and return a list. Raise a single clear error for any other value.

    pydantic itself would report one error for each type of the union.
    """
    if value is None:
        return None
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, list) or not all(isinstance(one, str) for one in many):
        raise ValueError("must be a string or a list of strings")
    return many


def _one_id_or_many(value: object) -> object:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


StopStrings = Annotated[list[str], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]
TokenIds = Annotated[list[int], BeforeValidator(_one_id_or_many, json_schema_input_type=int | list[int])]


class SamplingFields(BaseModel):
    """Fields that determine which tokens are chosen, and where an answer ends. None marks an absent field."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    sampling_seed: int | None = Field(default=None, description="SGLang's name of `seed`.")
    stop: StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = Field(
        default=None, description="Whether the text includes the stop string (SGLang)."
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
