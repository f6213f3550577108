"""``GET /v1/models`` (lists the names that requests may use), ``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.core import GatewayCore, naming_field
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.guards.parsed_body import ParsedBodyRoute
from outrider.services.gateway.parameters import check_prompt_text
from outrider.services.gateway.routes.context import ERROR_RESPONSES, core_of, ignored_header
from outrider.services.gateway.schemas.json_values import JsonValues
from outrider.services.gateway.schemas.native import DetokenizeRequest, TokenizeRequest
from outrider.services.gateway.schemas.template_options import template_options
from outrider.services.gateway.schemas.tools import template_tools
from outrider.services.gateway.tokenizer import ChatEnding
from outrider.shared.base.errors import InvalidRequestError, ModelNotFoundError

router = APIRouter(route_class=ParsedBodyRoute)


@router.get("/v1/models", responses=ERROR_RESPONSES)
async def list_models(request: Request) -> Response:
    """List the model names that requests may use."""
    core = core_of(request)
    return JsonResponse({"object": "list", "data": [_model(core, name) for name in core.model_names]})


@router.get("/v1/models/{model:path}", responses=ERROR_RESPONSES)
async def retrieve_model(model: str, request: Request) -> Response:
    """Describe one model."""
    core = core_of(request)
    if model not in core.model_names:
        raise ModelNotFoundError(f"The model {model[:128]!r} does not exist.", field="model")
    return JsonResponse(_model(core, model))


@router.post("/v1/tokenize", responses=ERROR_RESPONSES)
@router.post("/tokenize", responses=ERROR_RESPONSES)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of texts or of a chat. For a list of texts, the reply contains lists of ids."""
    core = core_of(request).of_model(body.model)
    core.builder.check_model(body.model, core.client.info)
    headers = ignored_header(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Set exactly one of prompt and messages.", field="prompt")
    codec = core.need_codec("prompt" if body.messages is None else "messages")
    if body.messages is not None:
        encoded = [await _encode_chat(core, body)]
    else:
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        if len(texts) > core.settings.max_batch:
            raise InvalidRequestError(
                f"prompt must contain at most {core.settings.max_batch} texts.", field="prompt"
            )
        for text in texts:
            check_prompt_text(text, "prompt")
            codec.limit.check(len(text), "prompt")
        special = body.add_special_tokens is not False
        encoded = [await codec.encode_aside(text, add_special_tokens=special) for text in texts]
    many = isinstance(body.prompt, list)
    reply: dict[str, Any] = {
        "tokens": [list(ids) for ids in encoded] if many else list(encoded[0]),
        "count": [len(ids) for ids in encoded] if many else len(encoded[0]),
        "max_model_len": core.client.info.max_model_len,
    }
    if body.return_token_strs:
        shown = [[codec.tokenizer.id_to_token(one) for one in ids] for ids in encoded]
        reply["token_strs"] = shown if many else shown[0]
    return JsonResponse(reply, headers=headers)


async def _encode_chat(core: GatewayCore, body: TokenizeRequest) -> tuple[int, ...]:
    messages = body.messages or []
    if not 1 <= len(messages) <= core.settings.max_messages:
        raise InvalidRequestError(
            f"messages must contain 1 to {core.settings.max_messages} messages.", field="messages"
        )
    values = JsonValues()
    shown = [message.for_template(f"messages.{number}", values) for number, message in enumerate(messages)]
    options = template_options(body.chat_template_kwargs)
    if tools := template_tools(body.tools or []):
        options["tools"] = tools
    ending = ChatEnding(
        body.add_generation_prompt is not False, add_special_tokens=bool(body.add_special_tokens)
    )
    codec = core.need_codec("messages")
    return await naming_field(codec.encode_chat_aside(shown, options, ending), "messages")


@router.post("/v1/detokenize", responses=ERROR_RESPONSES)
@router.post("/detokenize", responses=ERROR_RESPONSES)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids.

    The reply has the text twice, as vLLM's `prompt` and as SGLang's `text`.
    """
    core = core_of(request).of_model(body.model)
    info = core.client.info
    core.builder.check_model(body.model, info)
    headers = ignored_header(body)
    codec = core.need_codec("tokens")
    # Validation has ensured that all entries have one type. Checking a million token ids again would be slow.
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    batch = cast("list[list[int]]", body.tokens if many else [body.tokens])
    for tokens in batch:
        codec.limit.check_ids(len(tokens), "tokens")
    if any(not 0 <= token < info.vocab_size for tokens in batch for token in tokens):
        raise InvalidRequestError(f"tokens must be between 0 and {info.vocab_size - 1}.", field="tokens")

    def decode() -> list[str]:
        return [codec.decode(tokens, skip_special_tokens=body.skip_special_tokens) for tokens in batch]

    texts = await asyncio.to_thread(decode)
    text: Any = texts if many else texts[0]
    return JsonResponse({"prompt": text, "text": text}, headers=headers)


def _model(core: GatewayCore, name: str) -> dict[str, Any]:
    info = core.of_model(name).client.info
    return {
        "id": name,
        "object": "model",
        "created": core.started_at,
        "owned_by": "outrider",
        "root": info.model_id,
        "max_model_len": info.max_model_len,
    }
