"""Rank 0 rehearses alone: it sends no command and takes part in no collective operation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.toys import make_toy_target

from outrider.kernels import ahead
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.nn.open import checked_source, read_model_config
from outrider.shared.parallel.collectives import TorchCollectives
from outrider.shared.parallel.commands import MakePool
from outrider.shared.parallel.decoder import build_rank
from outrider.shared.parallel.lead import Lead
from outrider.shared.parallel.lead_decoder import LeadDecoder, SpreadPool
from outrider.shared.parallel.reduce import GroupReduce
from outrider.shared.parallel.shard import Shard


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything believe that a rehearsal is under way."""
    monkeypatch.setattr(ahead, "_rehearsing", True)


class Sent:
    """Stands for the connection to a rank."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def send(self, body: bytes) -> None:
        self.bodies.append(body)

    def receive_report(self) -> None:
        raise SystemExit  # ends the listening thread


def lead_of(sent: Sent) -> Lead:
    lead: Any = Lead.__new__(Lead)
    lead.failure, lead._connections, lead._step_beats = None, {1: sent}, 0
    return lead  # type: ignore[no-any-return]


def test_no_command_is_sent(rehearsal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent()
    lead = lead_of(sent)
    lead.send(MakePool(1, 16))
    with lead.together(MakePool(1, 16)):
        pass
    with pytest.raises(ValueError, match="a kernel"), lead.together(MakePool(1, 16)):
        raise ValueError("a kernel cannot be rehearsed")
    assert lead.failure is None, "the ranks are not out of step"
    assert not sent.bodies
    monkeypatch.setattr(ahead, "_rehearsing", False)
    lead.send(MakePool(1, 16))
    assert len(sent.bodies) == 1


def collectives(rank: int) -> TorchCollectives:
    """Collectives without a group, which fail if they exchange anything."""
    made: Any = TorchCollectives.__new__(TorchCollectives)
    made.rank, made.size, made.device = rank, 2, torch.device("cpu")
    return made  # type: ignore[no-any-return]


def test_nothing_is_exchanged(rehearsal: None) -> None:
    part = torch.ones(3)
    assert collectives(0).all_reduce(part) is part
    collectives(0).broadcast(part)
    gathered = collectives(0).gather(part)
    assert gathered is not None
    assert gathered.tolist() == [[0.0] * 3] * 2
    assert collectives(1).gather(part) is None
    assert part.tolist() == [1.0] * 3


def test_rank_0_runs_a_whole_pass_alone(rehearsal: None, tmp_path: Path) -> None:
    folder = make_toy_target(tmp_path, vocab_size=64, seed=3)
    config = read_model_config(folder)
    group, sent = collectives(0), Sent()
    with checked_source(folder, config, torch.device("cpu"), torch.float32) as checkpoint:
        decoder = build_rank(LeadDecoder, checkpoint, Shard.of(config, 0, 2), group, GroupReduce(group))
    decoder.connect(lead_of(sent), lambda: torch.empty(0))
    pool = decoder._pool_of(SpreadPool, 4, 16, 0)
    pool.lead_by(decoder)
    attention = create_backend("auto", decoder.device)
    lease = pool.lease(3)
    assert lease is not None
    attention.plan(build_batch(pool, [lease], [0], [3]))
    tokens, positions = torch.tensor([1, 2, 3]), torch.arange(3)
    with torch.inference_mode():
        output = decoder.forward(tokens, positions, attention, pool)
        assert decoder.logits(output.hidden).shape == (3, 64)
        greedy: Any = SimpleNamespace(all_greedy=True)
        assert decoder.choose(output.hidden, greedy, positions).shape == (3,)
    assert not sent.bodies
