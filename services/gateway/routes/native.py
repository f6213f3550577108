"""``POST /generate`` in SGLang's format, and the routes for the model and server data of SGLang clients."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.generation import collect
from outrider.services.gateway.guards.parsed_body import ParsedBodyRoute
from outrider.services.gateway.keys.caller import current_caller
from outrider.services.gateway.parameters import NATIVE, NATIVE_TEXT
from outrider.services.gateway.render import decision_object, memory_gib, speculation_object, trace_object
from outrider.services.gateway.request import Chunk, Completion, Finished, Started
from outrider.services.gateway.routes.completions import check_texts, encode_batch
from outrider.services.gateway.routes.context import ERROR_RESPONSES, core_of, ignored_header, timeout_of
from outrider.services.gateway.routes.logprobs import native_meta
from outrider.services.gateway.routes.native_progress import NativeProgress
from outrider.services.gateway.routes.states import StateTexts
from outrider.services.gateway.schemas.completions import as_batch
from outrider.services.gateway.schemas.native import NativeRequest
from outrider.services.gateway.served_target import ServedTarget, TargetStats
from outrider.services.gateway.sse import EventStream, run_until_disconnect
from outrider.shared.base.generation import FinishReason, SpeculationMode, SpeculationReport
from outrider.shared.base.logit_rules import LogprobParams
from outrider.shared.base.version import installed_version

router = APIRouter(route_class=ParsedBodyRoute)


@router.post("/generate", responses=ERROR_RESPONSES)
async def generate(body: NativeRequest, request: Request) -> Response:
    """Serve SGLang's route `/generate`: continue text or token ids.

    The reply to a batch, or to a request with `n` above 1, is a list. As in SGLang, every event of a stream
    repeats all text that has been generated so far.
    """
    core = core_of(request).of_model(body.model)
    core.builder.check_model(body.model, core.client.info)
    parameters = body.parameters()
    headers = ignored_header(body)
    batch = as_batch(body.source())
    surface = NATIVE if body.text is None else NATIVE_TEXT
    per_prompt = body.per_prompt(len(batch))
    sequences = core.builder.check(parameters, surface, len(batch))
    if per_prompt:
        sequences = sum(core.builder.check(one, surface, 1) for one in per_prompt)
    check_texts(core, batch, surface.prompt)

    async def prompts() -> Sequence[tuple[int, ...]]:
        return await encode_batch(core, batch, surface.prompt)

    as_list = body.is_batch or sequences > 1
    rids = _rids(body.rid, as_list, [one.n or 1 for one in per_prompt or [parameters] * len(batch)])
    job = Job(
        prompts,
        sequences,
        parameters,
        surface,
        timeout_of(request),
        rids,
        per_prompt,
        streams=bool(body.stream),
    )
    with_text = bool(body.return_text_in_logprobs)
    if body.stream:
        events = _stream(core, job, as_list, with_text, bool(body.return_prompt_token_ids))
        return EventStream(events, core.settings.keep_alive_s, headers)
    completions = await run_until_disconnect(request.receive, collect(core.generate(job), sequences))
    wanted, texts = _wanted(job), StateTexts()
    states = [one.states for one in per_prompt or [parameters] * len(batch) for _ in range(one.n or 1)]
    replies = [
        _reply(core, job, one, rids[index], wanted[index], with_text) for index, one in enumerate(completions)
    ]
    for reply, one, asked in zip(replies, completions, states, strict=True):
        reply["meta_info"] |= texts.native(one, asked)
        if body.return_prompt_token_ids:
            reply["prompt_token_ids"] = list(one.prompt_ids)
    return await texts.reply(replies if as_list else replies[0], headers)


async def _stream(
    core: GatewayCore, job: Job, as_list: bool, with_text: bool, with_prompt_ids: bool
) -> AsyncGenerator[str, None]:
    found: dict[int, NativeProgress] = {}
    wanted = _wanted(job)
    async with aclosing(core.generate(job)) as events:
        async for one in events:
            index = one.index
            match one.event:
                case Started() as start:
                    found[index] = NativeProgress(core, start, wanted[index], with_text)
                    continue
                case Chunk() as chunk:
                    progress = found[index]
                    progress.add(chunk)
                    if not (chunk.text or chunk.token_ids or chunk.rounds):
                        continue
                    meta = _meta_so_far(core, progress, job.rids[index])
                    traced = [trace_object(each) for each in chunk.rounds]
                    extra: dict[str, Any] = {"speculation": {"trace": traced}} if traced else {}
                case Finished() as end:
                    progress = found[index]
                    meta = _meta(core, end, job.rids[index], progress.started.seed)
                    extra = {"speculation": speculation_object(end.speculation)}
                    if with_prompt_ids:
                        extra["prompt_token_ids"] = list(progress.started.prompt_ids)
            yield progress.event(meta, extra | ({"index": index} if as_list else {}))


def _rids(rid: str | list[str] | None, as_list: bool, choices: Sequence[int]) -> tuple[str, ...]:
    """Return the name of every sequence.

    Args:
        rid: The client's name of the request, or a list with one name for each prompt. With None, generate a
            name.
        as_list: Whether the reply is a list. If it is, the names of its sequences are numbered.
        choices: Number of sequences for each prompt.
    """
    if isinstance(rid, list):
        return tuple(
            name if count == 1 else f"{name}-{choice}"
            for name, count in zip(rid, choices, strict=True)
            for choice in range(count)
        )
    name = rid or uuid.uuid4().hex
    return tuple(f"{name}-{index}" for index in range(sum(choices))) if as_list else (name,)


def _wanted(job: Job) -> list[LogprobParams]:
    """Return the logprobs that the client wants of each sequence."""
    if not job.per_prompt:
        return [job.parameters.logprobs.wanted] * job.sequences
    return [one.logprobs.wanted for one in job.per_prompt for _ in range(one.n or 1)]


def _reply(
    core: GatewayCore, job: Job, one: Completion, rid: str, wanted: LogprobParams, with_text: bool
) -> dict[str, Any]:
    trace = job.parameters.speculation.trace
    return {
        "text": one.text,
        "output_ids": one.token_ids,
        "meta_info": _meta(core, one.finished, rid, one.seed)
        | native_meta(core, wanted, one.prompt_ids, one.chunks, with_text),
        "speculation": speculation_object(one.finished.speculation, one.rounds if trace else None),
    }


def _meta(core: GatewayCore, end: Finished, rid: str, seed: int) -> dict[str, Any]:
    """Return SGLang's `meta_info` of a finished sequence."""
    usage = end.usage
    return {
        "id": rid,
        "finish_reason": _finish_reason(end),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "weight_version": core.client.info.weight_version,
        "e2e_latency": round(end.e2e_s, 6),
        "seed": seed,
        **_spec_meta(end.speculation, usage.completion_tokens),
    }


def _meta_so_far(core: GatewayCore, progress: NativeProgress, rid: str) -> dict[str, Any]:
    """Return SGLang's `meta_info` of a sequence that continues."""
    return {
        "id": rid,
        "finish_reason": None,
        "prompt_tokens": progress.started.prompt_tokens,
        "completion_tokens": progress.num_tokens,
        "cached_tokens": progress.cached_tokens,
        "weight_version": core.client.info.weight_version,
        **_spec_meta(progress.rounds.report(), progress.num_tokens),
    }


def _spec_meta(stats: SpeculationReport, completion_tokens: int) -> dict[str, Any]:
    """Return SGLang's fields on speculation. Empty if nothing was drafted.

    SGLang defines the accept length as completion tokens per verify pass. The completion tokens include the
    token that the prefill emits.
    """
    if not stats.draft_tokens:
        return {}
    return {
        "spec_verify_ct": stats.rounds,
        "spec_accept_length": round(completion_tokens / stats.rounds, 6) if stats.rounds else 0.0,
        "spec_accept_rate": round(stats.accepted_tokens / stats.draft_tokens, 6),
        "spec_num_correct_drafts": stats.accepted_tokens,
        "spec_num_proposed_drafts": stats.draft_tokens,
        "spec_correct_drafts_histogram": list(stats.accepted_histogram),
    }


def _finish_reason(end: Finished) -> dict[str, Any]:
    match end.reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": end.matched_stop}
        case FinishReason.LENGTH:
            return {"type": "length", "length": end.usage.completion_tokens}
        case FinishReason.CANCELLED:
            return {"type": "abort", "message": "The target cancelled the request."}


@router.get("/get_model_info", responses=ERROR_RESPONSES)
@router.get("/model_info", responses=ERROR_RESPONSES)
async def model_info(request: Request) -> Response:
    """Describe the served model, under SGLang's names."""
    core = core_of(request)
    info = core.client.info
    return JsonResponse(
        {
            **_model_paths(core, info),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": info.weight_version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "architectures": [info.architecture],
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "dtype": info.dtype,
            "device": info.device,
        }
    )


@router.get("/get_weight_version", responses=ERROR_RESPONSES)
@router.get("/weight_version", responses=ERROR_RESPONSES)
async def weight_version(request: Request) -> Response:
    """Return the version of the weights."""
    return JsonResponse({"weight_version": core_of(request).client.info.weight_version})


@router.get("/server_info", responses=ERROR_RESPONSES)
@router.get("/get_server_info", responses=ERROR_RESPONSES)
async def server_info(request: Request) -> Response:
    """Return the settings, under SGLang's names, and the current load."""
    core = core_of(request)
    found = [one for one in await core.targets.refresh(core.targets.members) if one is not None]
    if not found:
        raise core.targets.unavailable()
    info, stats = found[0]
    throughput = core.metrics.recent.throughput()
    return JsonResponse(
        {
            "version": installed_version(),
            "status": "ready" if core.ready else "not ready",
            **_model_paths(core, info),
            "weight_version": info.weight_version,
            "is_embedding": False,
            "skip_tokenizer_init": core.codec is None,
            "host": core.settings.host,
            "port": core.settings.port,
            "device": info.device,
            "dtype": info.dtype,
            "tp_size": info.tp_size,
            "dp_size": len(found),
            "pp_size": 1,
            "disaggregation_mode": "null",
            "tool_call_parser": core.parsers.tools,
            "reasoning_parser": core.parsers.reasoning,
            "context_length": info.max_model_len,
            "max_model_len": info.max_model_len,
            # At least one token must be left for the answer.
            "max_req_input_len": info.max_model_len - 1,
            "page_size": info.page_size,
            "max_total_num_tokens": stats.pages_total * info.page_size,
            "last_gen_throughput": throughput,
            "speculative_algorithm": info.algorithm or None,
            "speculative_draft_model_path": info.draft_model or None,
            "speculation_mode": _default_mode(core.settings.speculation_mode).value,
            "speculative_num_steps": info.num_steps,
            "speculative_eagle_topk": info.topk,
            "speculative_num_draft_tokens": info.num_draft_tokens,
            "speculative_max_steps": info.max_steps,
            "speculative_max_topk": info.max_topk,
            "speculative_max_nodes": info.max_nodes,
            "max_running_requests": info.max_running_requests,
            "max_queued_requests": core.settings.max_queued_requests,
            "internal_states": [_load(one, its_stats, throughput) for one, its_stats in found],
        }
    )


def _model_paths(core: GatewayCore, info: ServedTarget) -> dict[str, Any]:
    return {
        "model_path": info.model_path,
        "served_model_name": core.model_names[0],
        "tokenizer_path": str(core.settings.tokenizer) if core.settings.tokenizer else None,
    }


def _default_mode(mode: SpeculationMode) -> SpeculationMode:
    """Return the mode of the caller's requests that name none, given the server's default mode."""
    caller = current_caller.get()
    return mode if caller is None else caller.mode(None, mode)


def _load(info: ServedTarget, stats: TargetStats, throughput: float) -> dict[str, Any]:
    """Return the current load and the memory of one target."""
    weights, cache, graphs = memory_gib(stats.resources)
    return {
        # The gateway counts the tokens of all targets together.
        "last_gen_throughput": throughput,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "effective_max_running_requests_per_dp": info.max_running_requests,
        "memory_usage": {
            "weight": weights,
            "kvcache": cache,
            "graph": graphs,
            "token_capacity": stats.pages_total * info.page_size,
        },
        "draft_state": stats.draft_state,
        "avg_spec_accept_length": stats.accept_length,
        "kv_pages_total": stats.pages_total,
        "kv_pages_free": stats.pages_free,
        "kv_pages_held": stats.pages_held,
        "prefix_cache": stats.prefix_cache.as_json(),
        "auto": decision_object(stats.auto),
    }
