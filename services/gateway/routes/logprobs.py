"""Builds the logprobs fields of replies and stream chunks, in the format of each route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.logprobs import (
    chat_logprobs,
    completion_logprobs,
    native_logprobs,
    prompt_logprobs_list,
    token_ids_logprobs,
)
from outrider.services.gateway.request import Chunk, Completion
from outrider.shared.base.logit_rules import LogprobParams, TokenLogprob


def chunk_logprobs(core: GatewayCore, job: Job) -> Callable[[int, Chunk], dict[str, Any] | None] | None:
    """Return a function that builds the `logprobs` of a chat chunk. None if the client wants no logprobs."""
    wanted = job.parameters.logprobs
    if wanted.wanted.top is None:
        return None

    def of_chunk(index: int, chunk: Chunk) -> dict[str, Any] | None:
        if not chunk.logprobs:
            return None
        return chat_logprobs(chunk.token_ids, chunk.logprobs, core.token_bytes, wanted.ids_as_text)

    return of_chunk


def chat_reply_logprobs(core: GatewayCore, job: Job, one: Completion) -> dict[str, Any] | None:
    """Return the `logprobs` of a chat choice. None if the client wants no logprobs."""
    wanted = job.parameters.logprobs
    if wanted.wanted.top is None:
        return None
    return chat_logprobs(one.token_ids, one.logprobs, core.token_bytes, wanted.ids_as_text)


def prompt_logprobs_field(core: GatewayCore, job: Job, one: Completion) -> dict[str, Any]:
    """Return vLLM's field `prompt_logprobs`. Empty if the client did not ask for this field."""
    top = job.parameters.logprobs.prompt_list
    if top is None:
        return {}
    listed = prompt_logprobs_list(one.prompt_ids, one.prompt_logprobs, top, core.token_bytes)
    return {"prompt_logprobs": listed}


def completion_reply_logprobs(core: GatewayCore, job: Job, one: Completion) -> dict[str, Any] | None:
    """Return the `logprobs` of a completion and of its echoed prompt.

    None if the client wants no logprobs.
    """
    wanted = job.parameters.logprobs
    if wanted.wanted.top is None:
        return None
    prompt: Sequence[int] = ()
    logprobs: list[TokenLogprob | None] = []
    if wanted.echoed is not None:
        most = wanted.echoed
        echoed = [
            TokenLogprob(each.logprob, each.top_ids[:most], each.top_logprobs[:most])
            for each in one.prompt_logprobs
        ]
        prompt, logprobs = one.prompt_ids, [None, *echoed]
    return completion_logprobs(
        [*prompt, *one.token_ids], [*logprobs, *one.logprobs], core.token_bytes, wanted.ids_as_text
    )


def completion_chunk_logprobs(
    core: GatewayCore, job: Job
) -> Callable[[int, Chunk], dict[str, Any] | None] | None:
    """Return a function that builds the `logprobs` object of a completion chunk.

    The logprobs of an echoed prompt are sent in separate chunks. For each sequence, the function keeps track
    of the text offset and of the position in the prompt.

    Returns:
        The function, or None if the client wants no logprobs.
    """
    wanted = job.parameters.logprobs
    if wanted.wanted.top is None:
        return None
    offsets: dict[int, int] = {}
    scored: dict[int, int] = {}

    def of_chunk(index: int, chunk: Chunk) -> dict[str, Any] | None:
        logprobs: Sequence[TokenLogprob | None] = chunk.logprobs
        token_ids: Sequence[int] = chunk.token_ids
        if chunk.prompt_logprobs:
            logprobs = chunk.prompt_logprobs
            first = scored.get(index, 0)
            if not first:
                logprobs = [None, *logprobs]
            scored[index] = first + len(logprobs)
            token_ids = chunk.prompt_ids[first : first + len(logprobs)]
        if not logprobs:
            return None
        start = offsets.get(index, 0)
        offsets[index] = start + sum(
            len(core.token_bytes(token).decode("utf-8", "replace")) for token in token_ids
        )
        return completion_logprobs(token_ids, logprobs, core.token_bytes, wanted.ids_as_text, start)

    return of_chunk


def native_meta(
    core: GatewayCore,
    wanted: LogprobParams,
    prompt_ids: Sequence[int],
    chunks: Sequence[Chunk],
    with_text: bool,
) -> dict[str, Any]:
    """Return the fields of `meta_info` that contain logprobs. Empty if the client wants no logprobs."""
    return native_output(core, wanted, chunks, with_text) | native_input(
        core, wanted, prompt_ids, chunks, with_text
    )


def native_output(
    core: GatewayCore, wanted: LogprobParams, chunks: Sequence[Chunk], with_text: bool
) -> dict[str, list[Any]]:
    """Return the fields of `meta_info` with one entry per token of the answer's `chunks`.

    Empty if the client wants no logprobs.
    """
    if wanted.top is None:
        return {}
    bytes_of = core.token_bytes if with_text else None
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    emitted = [one for chunk in chunks for one in chunk.logprobs]
    own, tops = native_logprobs(token_ids, emitted, bytes_of)
    meta: dict[str, list[Any]] = {"output_token_logprobs": own}
    if wanted.top:
        meta["output_top_logprobs"] = tops
    if wanted.token_ids:
        meta["output_token_ids_logprobs"] = token_ids_logprobs(wanted.token_ids, emitted, bytes_of)
    return meta


def native_input(
    core: GatewayCore,
    wanted: LogprobParams,
    prompt_ids: Sequence[int],
    chunks: Sequence[Chunk],
    with_text: bool,
) -> dict[str, list[Any]]:
    """Return the fields of `meta_info` with the logprobs of the prompt. Empty lists if it has none.

    The result is an empty dictionary if the client wants no logprobs.
    """
    if wanted.top is None:
        return {}
    bytes_of = core.token_bytes if with_text else None
    own: list[Any] = []
    tops: list[Any] = []
    named: list[Any] = []
    most = wanted.top
    if wanted.prompt_top is not None:
        scored: list[TokenLogprob | None] = [one for chunk in chunks for one in chunk.prompt_logprobs]
        own, tops = native_logprobs(prompt_ids[wanted.prompt_start - 1 :], [None, *scored], bytes_of)
        named = token_ids_logprobs(wanted.token_ids, [None, *scored], bytes_of)
        most = wanted.prompt_top
    meta = {"input_token_logprobs": own}
    if most:
        meta["input_top_logprobs"] = tops
    if wanted.token_ids:
        meta["input_token_ids_logprobs"] = named
    return meta
