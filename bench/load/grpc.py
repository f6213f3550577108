"""`GrpcLoad`: the client through which a load sends requests to the gateway's gRPC service.

No other module of `bench` uses protobuf messages.
"""

from __future__ import annotations

import time
from typing import Any

from outrider.bench.load.open_loop import Experience, LoadClient, LoadRequest
from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.rpc.client import connect_aio

MODES = {
    "auto": common_pb2.SPECULATION_MODE_AUTO,
    "on": common_pb2.SPECULATION_MODE_ON,
    "off": common_pb2.SPECULATION_MODE_OFF,
}


class GrpcLoad(LoadClient):
    """gRPC client that sends requests to a gateway. Create it inside the running event loop.

    Args:
        address: ``host:port`` or ``unix:/path`` of a gateway.
        api_key: API key to send, or None.
    """

    def __init__(self, address: str, api_key: str | None) -> None:
        self._channel = connect_aio(address)
        self._stub = gateway_pb2_grpc.InferenceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._model: str | None = None

    async def ask(self, request: LoadRequest, experience: Experience) -> None:
        sampling: dict[str, Any] = {"seed": request.seed, **request.sampling}
        options = gateway_pb2.GenerationOptions(
            max_tokens=request.max_tokens,
            sampling=common_pb2.SamplingOptions(**sampling),
            speculation=_speculation(request.speculation),
            ignore_eos=True,
        )
        model = await self._first_model()
        call: Any
        if request.is_chat:
            messages = [gateway_pb2.Message(**message) for message in request.prompt]  # type: ignore[arg-type]
            call = self._stub.Chat(
                gateway_pb2.ChatRequest(model=model, messages=messages, options=options),
                metadata=self._metadata,
            )
        else:
            prompt: dict[str, Any] = (
                {"text": request.prompt}
                if isinstance(request.prompt, str)
                else {"token_ids": gateway_pb2.TokenIds(ids=request.prompt)}  # type: ignore[arg-type]
            )
            call = self._stub.Complete(
                gateway_pb2.CompleteRequest(model=model, options=options, **prompt), metadata=self._metadata
            )
        async for reply in call:
            if reply.WhichOneof("event") == "chunk":
                experience.chunks.append(time.perf_counter())
            else:
                experience.tokens = reply.finished.usage.completion_tokens
                experience.accept_length = reply.finished.speculation.accept_length
                experience.draft_tokens = reply.finished.speculation.draft_tokens

    async def close(self) -> None:
        await self._channel.close()

    async def _first_model(self) -> str:
        if self._model is None:
            reply = await self._stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=self._metadata)
            if not reply.models:
                raise ConfigurationError("The gateway at --grpc lists no model.", field="--grpc")
            self._model = reply.models[0].id
        return self._model


def _speculation(given: dict[str, Any]) -> common_pb2.SpeculationOptions:
    sizes = {name: given[name] for name in ("depth", "topk", "max_nodes") if name in given}
    mode = MODES[given["mode"]] if "mode" in given else common_pb2.SPECULATION_MODE_UNSPECIFIED
    return common_pb2.SpeculationOptions(mode=mode, **sizes)
