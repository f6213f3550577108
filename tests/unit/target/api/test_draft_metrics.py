"""The metrics of a draft with its own process arrive, and no request waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.services.target.api import draft_metrics
from outrider.services.target.api.draft_metrics import DraftMetricsCache

WAIT_S = 20


class Draft(draft_pb2_grpc.DraftServicer):
    """Answers GetInfo with a numbered text."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def GetInfo(
        self, request: draft_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.GetInfoReply:
        self.asked += 1
        await self.may_answer.wait()
        return draft_pb2.GetInfoReply(prometheus_text=f"text {self.asked}")


async def serve(draft: Draft, path: Path) -> grpc.aio.Server:
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServicer_to_server(draft, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


async def until(metrics: DraftMetricsCache, text: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while metrics.text() != text:
            await asyncio.sleep(0.01)


async def test_without_a_draft_process_nothing_is_asked() -> None:
    metrics = DraftMetricsCache(None)
    assert metrics.text() == ""
    await metrics.close()


async def test_each_answer_replaces_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_metrics, "ASK_AGAIN_S", 0.0)
    draft = Draft()
    server = await serve(draft, tmp_path / "d.sock")
    metrics = DraftMetricsCache(f"ipc://{tmp_path}/d.sock")
    try:
        assert metrics.text() == "", "it does not wait for the answer"
        await until(metrics, "text 1")
        await until(metrics, "text 2")
        # While the draft does not answer, the last answer is kept. There is no wait and no further request.
        draft.may_answer.clear()
        await until(metrics, f"text {draft.asked}")
        asked = draft.asked
        for _ in range(10):
            assert metrics.text().startswith("text ")
            await asyncio.sleep(0)
        assert draft.asked <= asked + 1
        # A draft that has gone has no metrics.
        await server.stop(None)
        await until(metrics, "")
    finally:
        await metrics.close()
        await server.stop(None)


async def test_a_draft_is_not_asked_more_than_once_a_second(tmp_path: Path) -> None:
    draft = Draft()
    server = await serve(draft, tmp_path / "d.sock")
    metrics = DraftMetricsCache(f"unix:{tmp_path}/d.sock")
    try:
        metrics.text()
        metrics._asked_at += 3600
        await until(metrics, "text 1")
        for _ in range(100):
            assert metrics.text() == "text 1"
        assert draft.asked == 1
    finally:
        await metrics.close()
        await server.stop(None)
