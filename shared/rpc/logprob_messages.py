"""Converts logit rules and logprobs (`shared.base.logit_rules`) to and from protobuf."""

from __future__ import annotations

from outrider.common.v1 import common_pb2
from outrider.shared.base.logit_rules import LogitRules, LogprobParams, TokenLogprob


def rules_from_proto(options: common_pb2.SamplingOptions) -> LogitRules:
    """Return the logit rules of a request message. A rule whose field is absent changes nothing.

    Raises:
        InvalidRequestError: A value is outside its range. The error names the field.
    """
    return LogitRules(
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty if options.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(options.logit_bias.items())),
        min_tokens=options.min_tokens,
        allowed_token_ids=tuple(options.allowed_token_ids) or None,
        bad_words=tuple(tuple(word.ids) for word in options.bad_words),
    )


def set_rules(options: common_pb2.SamplingOptions, rules: LogitRules) -> None:
    """Write rules into the sampling options of a request. Fields of neutral rules stay absent."""
    if rules.neutral:
        return
    options.presence_penalty = rules.presence_penalty
    options.frequency_penalty = rules.frequency_penalty
    options.repetition_penalty = rules.repetition_penalty
    for token, bias in rules.logit_bias:
        options.logit_bias[token] = bias
    options.min_tokens = rules.min_tokens
    options.allowed_token_ids.extend(rules.allowed_token_ids or ())
    for word in rules.bad_words:
        options.bad_words.add(ids=word)


def logprobs_from_proto(options: common_pb2.LogprobOptions) -> LogprobParams:
    """Return the logprobs that a request asks for.

    Raises:
        InvalidRequestError: A value is outside its range. The error names the field.
    """
    return LogprobParams(
        top=options.top if options.HasField("top") else None,
        prompt_top=options.prompt_top if options.HasField("prompt_top") else None,
        prompt_start=options.prompt_start,
        token_ids=tuple(options.token_ids),
    )


def logprobs_to_proto(wanted: LogprobParams) -> common_pb2.LogprobOptions | None:
    """Return the message that requests these logprobs, or None if no logprobs are wanted."""
    if not wanted.wanted:
        return None
    return common_pb2.LogprobOptions(
        top=wanted.top,
        prompt_top=wanted.prompt_top,
        prompt_start=wanted.prompt_start,
        token_ids=wanted.token_ids,
    )


def write_logprob(one: TokenLogprob, message: common_pb2.TokenLogprob) -> None:
    """Write one token's logprobs into a new message."""
    message.logprob = one.logprob
    if one.top_ids:
        message.top_ids.extend(one.top_ids)
        message.top_logprobs.extend(one.top_logprobs)
    if one.requested:
        message.requested.extend(one.requested)


def logprob_from_proto(message: common_pb2.TokenLogprob) -> TokenLogprob:
    """Return the logprobs of one token."""
    # A slice is copied at once, not number by number.
    return TokenLogprob(message.logprob, message.top_ids[:], message.top_logprobs[:], message.requested[:])
