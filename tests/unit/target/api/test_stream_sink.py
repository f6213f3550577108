"""The events of one stream: lists of limited size, and reports of an unread backlog."""

from __future__ import annotations

from outrider.services.target.api.stream_sink import MAX_BATCH_BYTES, MAX_UNREAD_BYTES, StreamSink
from outrider.services.target.request import TokensEvent
from outrider.shared.base.token_states import TokenStates


def event(number: int, size: int) -> TokensEvent:
    return TokensEvent(f"r{number}", (), states=TokenStates(0, 1, bytes(size)))


async def read(sink: StreamSink) -> list[list[str]]:
    sink.close()
    return [[one.request_id for one in batch] async for batch in sink.batches()]


async def test_lists_of_large_events_are_divided() -> None:
    sink = StreamSink()
    third = MAX_BATCH_BYTES // 3
    sink.put([event(0, third), event(1, third), event(2, third), event(3, third)])
    sink.put([event(4, 2 * MAX_BATCH_BYTES), event(5, 1)])
    assert await read(sink) == [["r0", "r1", "r2"], ["r3"], ["r4"], ["r5"]]


async def test_small_events_stay_together() -> None:
    sink = StreamSink()
    sink.put([event(0, 100)])
    sink.put([event(1, 100), event(2, 100)])
    assert await read(sink) == [["r0", "r1", "r2"]]


async def test_states_count_towards_the_backlog() -> None:
    reports: list[bool] = []
    sink = StreamSink(reports.append)
    sink.put([event(0, MAX_UNREAD_BYTES // 2)])
    assert reports == []
    sink.put([event(1, MAX_UNREAD_BYTES)])
    assert reports == [True]
    await read(sink)
    assert reports == [True, False]
