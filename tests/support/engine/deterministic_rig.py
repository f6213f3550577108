"""Engines with deterministic kernels, and the logits from which these engines chose their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from outrider.kernels.verify import SamplingTensors
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.deterministic import deterministic
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import Drafter
from support.engine.target_harness import Harness, make_harness

PROMPT = [5, 9, 2, 33, 7, 1, 1, 60]


def load(path: Path, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """Load a target with batch-invariant kernels: a row's result does not depend on other rows."""
    return deterministic(load_decoder(path, device, dtype))


def harness_of(decoder: Decoder, drafter: Drafter, **options: object) -> Harness:
    """Build an engine with deterministic attention."""
    harness = make_harness(decoder, drafter, **options)  # type: ignore[arg-type]
    harness.runner.attention = DeterministicAttention()
    return harness


@contextmanager
def recorded(decoder: Decoder) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Collect the logits of every row from which a token was chosen, by the token's index."""
    rows: dict[int, list[torch.Tensor]] = {}
    choose = decoder.choose

    def noting(hidden: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor) -> torch.Tensor:
        for position, row in zip(positions.tolist(), decoder.logits(hidden).cpu(), strict=True):
            rows.setdefault(position, []).append(row.clone())
        return choose(hidden, sampling, positions)

    with mock.patch.object(decoder, "choose", noting):
        yield rows


def plain(
    decoder: Decoder, count: int, sampling: SamplingParams | None = None
) -> tuple[list[int], dict[int, torch.Tensor]]:
    """Return the tokens and logits of plain decoding after `PROMPT`: batch size 1, prompt in one chunk."""
    harness = harness_of(decoder, NoDrafter())
    harness.submit(PROMPT, count, request_id="plain", mode=SpeculationMode.OFF, sampling=sampling)
    with recorded(decoder) as rows:
        harness.run()
    assert all(len(found) == 1 for found in rows.values())
    return harness.sink.tokens["plain"], {position: found[0] for position, found in rows.items()}


def assert_bits(expected: dict[int, torch.Tensor], rows: dict[int, list[torch.Tensor]]) -> None:
    """Assert that, for every token of the plain run, one of `rows` has exactly the bits of the plain row."""
    for position, logits in expected.items():
        assert any(torch.equal(logits, row) for row in rows[position]), (
            f"no row for token {position} has the bits of plain decoding"
        )


def logits_in_chunks(
    decoder: Decoder, ids: Sequence[int], sizes: Sequence[int], page_size: int = 4
) -> torch.Tensor:
    """Return the logits ``[len(ids), V]`` of a prompt that is computed in chunks of these sizes."""
    pool = decoder.make_pool(-(-len(ids) // page_size), page_size)
    lease = pool.lease(len(ids))
    assert lease is not None
    attention, logits, first = DeterministicAttention(), [], 0
    tokens = torch.tensor(ids, device=decoder.device)
    for size in sizes:
        attention.plan(build_batch(pool, [lease], [first], [size]))
        index = torch.arange(first, first + size, device=decoder.device)
        logits.append(decoder.logits(decoder.forward(tokens[index], index, attention, pool).hidden))
        first += size
    return torch.cat(logits)
