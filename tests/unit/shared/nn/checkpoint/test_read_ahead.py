"""Reading ahead: threads read every tensor, respect the maximum lead, and end when the loading ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.models.toys import make_toy_target

from outrider.shared.nn.checkpoint import read_ahead
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.read_ahead import ReadAhead
from outrider.shared.nn.open import load_decoder


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the pieces that the threads read, with 100-byte pieces and a maximum lead of 250 bytes."""
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 100)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 250)
    taken: list[int] = []
    following = ReadAhead._next

    def noted(self: ReadAhead) -> torch.Tensor | None:
        piece = following(self)
        if piece is not None:
            taken.append(piece.numel())
        return piece

    monkeypatch.setattr(ReadAhead, "_next", noted)
    return taken


def test_reading_stays_within_the_maximum_lead(touched: list[int]) -> None:
    ahead = ReadAhead([torch.zeros(130, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.uint8)])
    workers = threads()
    assert len(workers) == read_ahead.THREADS
    for _ in range(10):
        ahead.used(126)
        assert sum(touched) <= 1260 + 250 + 100
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive(), "everything is read"
    assert sorted(touched) == [60] + [100] * 12
    ahead.close()


def test_close_stops_waiting_threads(touched: list[int]) -> None:
    ahead = ReadAhead([torch.zeros(10_000, dtype=torch.uint8)])
    ahead.close()
    assert sum(touched) <= 300
    assert not threads()


def test_a_model_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = CheckpointReader.read_ahead

    def noted(self: CheckpointReader, names: dict[str, object]) -> None:
        asked.extend(names)
        real(self, names)

    monkeypatch.setattr(CheckpointReader, "read_ahead", noted)
    folder = make_toy_target(tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    with CheckpointReader(folder) as reader:
        names = set(reader.names)
    load_decoder(folder, "cpu")
    assert set(asked) == names
    assert not threads(), "threads end with the loading"
