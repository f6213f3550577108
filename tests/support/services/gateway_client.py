"""Sends chats and completions to a gateway's public gRPC API, and collects the streamed answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc


@dataclass(slots=True)
class Result:
    """Everything that one stream received.

    Attributes:
        token_ids: Generated tokens.
        text: Generated text.
        rounds: Traces of the decoding rounds. Empty unless traces were requested.
        finished: The final message. None if the stream ended without a final message.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    rounds: list[common_pb2.RoundTrace] = field(default_factory=list)
    finished: gateway_pb2.Finished | None = None


class Client:
    """A client of a gateway's public gRPC API."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = gateway_pb2_grpc.InferenceStub(self.channel)

    def chat(
        self,
        prompt: str,
        *,
        mode: int = common_pb2.SPECULATION_MODE_AUTO,
        max_tokens: int = 96,
        temperature: float = 0.0,
        seed: int = 0,
        trace: bool = False,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> Result:
        """Run one chat to its end. Each chunk calls `on_tokens` with its token count when it arrives."""
        request = gateway_pb2.ChatRequest(
            messages=[gateway_pb2.Message(role="user", content=prompt)],
            options=gateway_pb2.GenerationOptions(
                max_tokens=max_tokens,
                sampling=common_pb2.SamplingOptions(temperature=temperature, seed=seed),
                speculation=common_pb2.SpeculationOptions(mode=mode, trace=trace),
                ignore_eos=True,
            ),
        )
        return self._collect(self.stub.Chat(request, timeout=100), on_tokens)

    def complete(
        self, tokens: Sequence[int], *, mode: int = common_pb2.SPECULATION_MODE_AUTO, max_tokens: int = 96
    ) -> Result:
        """Continue a prompt of token ids, and request traces."""
        request = gateway_pb2.CompleteRequest(
            token_ids=gateway_pb2.TokenIds(ids=tokens),
            options=gateway_pb2.GenerationOptions(
                max_tokens=max_tokens,
                sampling=common_pb2.SamplingOptions(temperature=0.0),
                speculation=common_pb2.SpeculationOptions(mode=mode, trace=True),
                ignore_eos=True,
            ),
        )
        return self._collect(self.stub.Complete(request, timeout=100))

    def _collect(
        self, replies: Iterable[Any], on_tokens: Callable[[int], None] = lambda count: None
    ) -> Result:
        result = Result()
        for reply in replies:
            if reply.HasField("finished"):
                result.finished = reply.finished
            else:
                result.token_ids.extend(reply.chunk.token_ids)
                result.text += reply.chunk.text
                result.rounds.extend(reply.chunk.rounds)
                on_tokens(len(reply.chunk.token_ids))
        return result
