"""Reads the metrics of a draft with its own process, for the target's statistics."""

from __future__ import annotations

import asyncio
import time

import grpc

from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.shared.rpc.address import grpc_address
from outrider.shared.rpc.client import connect_aio

ASK_AGAIN_S = 1.0
TIMEOUT_S = 1.0


class DraftMetricsCache:
    """Stores the metrics that the draft service last reported to this target. Use it on one event loop only.

    Args:
        address: Address of the draft service, as in the target's settings. None if there is no draft process.
    """

    def __init__(self, address: str | None) -> None:
        self._address = None if address is None else grpc_address(address, "draft")
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked_at = -ASK_AGAIN_S
        self._text = ""

    def text(self) -> str:
        """Return the metrics that the draft service last reported, and request newer ones in the background.

        This method never waits for the draft service.

        Returns:
            Prometheus text. It is empty before the first answer of the draft service, and if the latest
            request has failed.
        """
        now = time.monotonic()
        idle = self._task is None or self._task.done()
        if self._address is not None and idle and now - self._asked_at >= ASK_AGAIN_S:
            self._asked_at = now
            self._task = asyncio.create_task(self._ask(self._address), name="draft-metrics")
        return self._text

    async def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    async def _ask(self, address: str) -> None:
        if self._channel is None:
            self._channel = connect_aio(address)
        stub = draft_pb2_grpc.DraftStub(self._channel)
        try:
            self._text = (await stub.GetInfo(draft_pb2.GetInfoRequest(), timeout=TIMEOUT_S)).prometheus_text
        except grpc.aio.AioRpcError:
            self._text = ""
            # The next call opens another channel, in case the files of the certificates have changed.
            channel, self._channel = self._channel, None
            await channel.close()
