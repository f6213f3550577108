"""Runs ten thousand mixed rounds on a GPU while requests come, go, stop and pause. Nothing may grow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from support.drafts.gpu_pair import TARGET, make_pair_drafter
from support.engine.target_harness import make_harness
from support.outputs.mixed_crowd import SHAPES, Crowd, check_client_traces, draw_clients, watched_rounds

from outrider.kernels.ahead import compile_ahead
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.engine.recordings import USUAL_MODES
from outrider.services.target.model.packed_batch import Entry, SamplingMode
from outrider.services.target.model.step_runner import Round, StepRunner
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.graphs import MAX_LATE_GRAPHS, GraphCache
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]
ROUNDS = 10_000
WARM = 3_000
MOST_LIVE = 10
SIZES = (1, 2, 4, 8)
TREE = DraftShape(5, 4, 16)
USUAL = tuple(dict.fromkeys((NO_DRAFT, TREE, *offered_shapes((TREE, DraftShape(5, 1, 6)), max(SIZES)))))
"""Shapes whose rounds are recorded at the start: the default tree, and those from which `auto` chooses."""
MOST_BYTES_PER_GRAPH = 8 << 20


@contextmanager
def usual_rounds_are_recorded() -> Iterator[list[int]]:
    """Assert that rounds replay graphs of the start if all rows are alike. Yields a list of their sizes."""
    found: list[int] = []
    launch = StepRunner.launch

    def watching(self: StepRunner, entries: Sequence[Entry], *rest: object, **options: object) -> Round:
        shapes = {entry.shape for entry in entries}
        alike = len(shapes) == 1 and len({entry.sequence.has_features for entry in entries}) == 1
        mode = SamplingMode.of([entry.sequence for entry in entries])
        if alike and shapes <= set(USUAL) and len(entries) in SIZES and mode in USUAL_MODES:
            assert self.replays(entries), "usual graphs must be recorded at the start"
            found.append(len(entries))
        return launch(self, entries, *rest, **options)  # type: ignore[arg-type]

    with mock.patch.object(StepRunner, "launch", watching):
        yield found


def test_ten_thousand_rounds() -> None:
    decoder = load_decoder(TARGET, "cuda", torch.bfloat16)
    drafter = make_pair_drafter(decoder)
    harness = make_harness(
        decoder,
        drafter,
        plan=LoopPlan(lookahead=1, drafts_on_device=True),
        graphs=GraphCache(decoder.device),
        num_pages=160,
        max_running=8,
        max_queued=64,
        prefill_chunk=128,
    )
    sizes = [(bs, shape) for bs in reversed(SIZES) for shape in USUAL]
    records = [record for _, record in harness.engine.recordings.rounds(sizes)]
    compile_ahead(decoder.device, records)
    with harness.runner.graphs.keeping():
        for record in records:
            record()
    graphs_start = set(harness.runner.graphs.keys)
    with usual_rounds_are_recorded() as usual:
        for bs in SIZES:
            for mode in (SpeculationMode.ON, SpeculationMode.OFF):
                for number in range(bs):
                    name = f"{mode} {number} of {bs}"
                    harness.submit([number + 1] * 5, 20, request_id=name, mode=mode, shape=(5, 4, 16))
                harness.run()
    assert set(usual) == set(SIZES)
    alike = len(harness.sink.finished)
    rng = random.Random(0)
    crowd = Crowd(harness, rng, most_live=MOST_LIVE, haste=0.1)
    clients = draw_clients(
        rng,
        4_000,
        decoder.config.vocab_size,
        prompt_lens=(3, 30, 200),
        most_tokens=200,
        shapes=(*SHAPES, (5, 4, 16), (5, 4, 16)),
    )
    submitted = iter(clients)

    def rounds_until(total: int) -> int:
        while harness.engine.stats().rounds < total:
            crowd.act(lambda: next(submitted))
            if harness.engine.has_work():
                harness.engine.step()
        crowd.settle()
        torch.cuda.synchronize()
        harness.scheduler.check()
        assert harness.scheduler.allocator.held_pages == 0
        return torch.cuda.memory_allocated()

    with watched_rounds() as seen, usual_rounds_are_recorded():
        warm = rounds_until(WARM)
        graphs_warm, bytes_warm = set(harness.runner.graphs.keys), torch.cuda.memory_reserved()
        end = rounds_until(ROUNDS)
    graphs_end, bytes_end = set(harness.runner.graphs.keys), torch.cuda.memory_reserved()
    count = len(clients) - sum(1 for _ in submitted)
    print(
        f"{count} requests, {harness.engine.stats().rounds} rounds, {seen.mixed} of them mixed, "
        f"{harness.scheduler.num_retractions} retractions"
    )
    print(f"allocated {warm / 2**20:.1f} -> {end / 2**20:.1f} MiB")
    print(
        f"graphs {len(graphs_start)} -> {len(graphs_warm)} -> {len(graphs_end)}, "
        f"reserved {bytes_warm / 2**20:.0f} -> {bytes_end / 2**20:.0f} MiB"
    )
    assert seen.mixed > ROUNDS / 3
    assert not harness.sink.failed
    assert len(harness.sink.finished) == alike + count
    new_graphs = len(graphs_end - graphs_warm)
    assert end - warm <= (1 << 20) * (1 + 4 * new_graphs), "memory may grow only by late graphs"
    assert bytes_end - bytes_warm <= MOST_BYTES_PER_GRAPH * (4 + new_graphs)
    assert graphs_start <= graphs_end, "graphs of the start must be kept"
    assert len(graphs_end) <= len(graphs_start) + MAX_LATE_GRAPHS
    for client in clients[:count]:
        check_client_traces(harness, client, harness.sink.tokens.get(client.name, []))
    stats = harness.engine.stats().speculation
    identity = sum((accepted + 1) * count for accepted, count in enumerate(stats.histogram))
    emitted = harness.engine.stats().generated_tokens
    by_prefills = emitted - (identity - stats.tokens_cut)
    assert 0 <= by_prefills <= alike + count + harness.scheduler.num_retractions
    drafter.shutdown()
