"""Request fields of REST, written by `scripts/option_sources.py` from the table of options."""

from __future__ import annotations

from pydantic import BaseModel, Field

from outrider.services.gateway.schemas.field_types import ExpertsStart, RequestName, Salts, StartLength
from outrider.services.gateway.schemas.option_fields.speculation import SpeculationOptions


class GenerateFields(BaseModel):
    """Fields of ``/generate``, outside of `sampling_params`."""

    model: str | None = Field(default=None, description="Name of the model.")
    text: str | list[str] | None = Field(default=None, description="The prompt: a text, or a list of texts.")
    input_ids: list[int] | list[list[int]] | None = Field(
        default=None, description="The prompt as token ids, or a list of such prompts."
    )
    stream: bool | None = Field(default=None, description="Whether the reply is a stream.")
    rid: RequestName | list[RequestName] | None = Field(
        default=None, description="Id of the request, or a list with one id per prompt."
    )
    priority: int | None = Field(
        default=None, description="Requests with a higher number start first. Default: 0."
    )
    cache_salt: Salts | None = Field(
        default=None,
        description="Requests share the K/V of a prompt only if they have the same salt. May be a list.",
    )
    extra_key: Salts | None = Field(default=None, description="SGLang's other name of `cache_salt`.")
    speculation: SpeculationOptions | None = Field(
        default=None, description="Whether the server drafts, and how large the trees are."
    )
    return_logprob: bool | list[bool] | None = Field(
        default=None,
        description="Whether to return logprobs. This and the next two may be lists, one entry per prompt.",
    )
    top_logprobs_num: int | list[int] | None = Field(
        default=None, description="Number of alternatives per token, 0 to 20."
    )
    logprob_start_len: StartLength | list[StartLength] | None = Field(
        default=None, description="First prompt token whose logprob to return; -1 for no prompt token."
    )
    token_ids_logprob: list[int] | list[list[int]] | None = Field(
        default=None, description="Token ids whose logprobs to return at each token, or a list per prompt."
    )
    return_text_in_logprobs: bool | None = Field(
        default=None, description="Whether the logprobs contain the text of their tokens."
    )
    return_hidden_states: bool | list[bool] | None = Field(
        default=None, description="Return the hidden states after the final norm. Not in streams."
    )
    return_routed_experts: bool | None = Field(
        default=None, description="Return the experts that each layer chose for each token. Not in streams."
    )
    routed_experts_start_len: ExpertsStart | None = Field(
        default=None, description="Index of the first token whose experts are returned. Default: 0."
    )
    return_prompt_token_ids: bool | None = Field(
        default=None, description="Include the token ids of the prompt in each choice."
    )


class GenerateSamplingFields(BaseModel):
    """Fields of `sampling_params` that only ``/generate`` has."""

    max_new_tokens: int | None = Field(
        default=None, description="The largest number of tokens of the answer."
    )
    min_new_tokens: int | None = Field(
        default=None,
        description="Number of tokens before which no stop token or stop string ends the answer.",
    )
