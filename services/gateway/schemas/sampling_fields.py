"""Request fields for penalties, biases and forbidden tokens. Several routes share these fields."""

from __future__ import annotations

from pydantic import BaseModel, Field

from outrider.services.gateway.requested_rules import RequestedRules


class SamplingFields(BaseModel):
    """Fields that change the logits before a token is sampled. None marks an absent field."""

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

    def rules(self, min_tokens: int | None) -> RequestedRules:
        """Return the rules. `min_tokens` is an argument, because the field's name depends on the API."""
        return RequestedRules(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=min_tokens,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words or ()),
        )
