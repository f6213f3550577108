"""``GET /v1/models`` (names that requests may use), ``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.core import GatewayCore
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.guards.parsed_body import ParsedBodyRoute
from outrider.services.gateway.parameters import check_prompt_text
from outrider.services.gateway.routes.context import ERROR_RESPONSES, core_of
from outrider.services.gateway.schemas.native import DetokenizeRequest, TokenizeRequest
from outrider.shared.base.errors import InvalidRequestError, ModelNotFoundError

router = APIRouter(route_class=ParsedBodyRoute)


@router.get("/v1/models", responses=ERROR_RESPONSES)
async def list_models(request: Request) -> Response:
    """List the model names that requests may use."""
    core = core_of(request)
    return JsonResponse({"object": "list", "data": [_model(core, name) for name in _names(core)]})


@router.get("/v1/models/{model:path}", responses=ERROR_RESPONSES)
async def retrieve_model(model: str, request: Request) -> Response:
    """Describe one model."""
    core = core_of(request)
    if model not in _names(core):
        raise ModelNotFoundError(f"The model {model[:128]!r} does not exist.", field="model")
    return JsonResponse(_model(core, model))


@router.post("/tokenize", responses=ERROR_RESPONSES)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text."""
    core = core_of(request)
    core.builder.check_model(body.model, core.client.info)
    check_prompt_text(body.prompt, "prompt")
    codec = core.need_codec("prompt")
    codec.limit.check(len(body.prompt), "prompt")
    ids = await codec.encode_aside(body.prompt, add_special_tokens=body.add_special_tokens)
    return JsonResponse(
        {"tokens": list(ids), "count": len(ids), "max_model_len": core.client.info.max_model_len}
    )


@router.post("/detokenize", responses=ERROR_RESPONSES)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids."""
    core = core_of(request)
    info = core.client.info
    core.builder.check_model(body.model, info)
    codec = core.need_codec("tokens")
    codec.limit.check_ids(len(body.tokens), "tokens")
    if any(not 0 <= token < info.vocab_size for token in body.tokens):
        raise InvalidRequestError(f"tokens must be between 0 and {info.vocab_size - 1}.", field="tokens")
    return JsonResponse(
        {
            "prompt": await asyncio.to_thread(
                codec.decode, body.tokens, skip_special_tokens=body.skip_special_tokens
            )
        }
    )


def _names(core: GatewayCore) -> tuple[str, ...]:
    return core.settings.served_model_name or (core.client.info.model_id,)


def _model(core: GatewayCore, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": core.started_at,
        "owned_by": "outrider",
        "root": core.client.info.model_id,
        "max_model_len": core.client.info.max_model_len,
    }
