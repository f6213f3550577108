"""Runs ten thousand rounds on a GPU while requests come, go, stop and pause. Nothing may leak or grow."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from support.gpu_pair import TARGET, make_pair_drafter
from support.target_harness import Harness, make_harness

from outrider.kernels.ahead import compile_ahead
from outrider.services.target.engine.device_loop import OverlapPlan
from outrider.services.target.model.input_batch import SamplingMode
from outrider.services.target.policy.offered_shapes import offered_shapes
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.engine.buckets import Buckets
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]
ROUNDS = 10_000
WARM = 3_000
MOST_LIVE = 10
LONGEST_PAUSE = 200
"""Longest pause of a client, in rounds."""
SIZES = (1, 2, 4, 8)
SHAPE = (5, 4, 16)
TREE = DraftShape(*SHAPE)
OFFERED = offered_shapes((TREE, DraftShape(5, 1, 6)), max(SIZES))
"""The shapes from which `auto` chooses, including the tree."""
NODES = (1, 2, 4, 8, 16)
MOST_GRAPHS = len(SamplingMode) * len(SIZES) * (len(NODES) + 2 + len(OFFERED))
"""Maximum number of graphs: host-driven passes, plain rounds with and without features, and all shapes."""
MOST_BYTES_PER_GRAPH = 8 << 20
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4),
]


class Crowd:
    """Clients that submit, cancel and pause at random."""

    def __init__(self, harness: Harness, vocab_size: int, seed: int) -> None:
        self.harness = harness
        self.rng = random.Random(seed)
        self.vocab_size = vocab_size
        self.handles: deque[int] = deque(maxlen=MOST_LIVE)
        self.submitted = 0
        self.paused: dict[int, int] = {}
        """Handle → the round at which its client resumes."""
        # Pauses are counted in rounds, since their duration depends on the machine. No client is too slow
        # here.
        harness.engine.limits = replace(harness.engine.limits, pause_timeout_s=math.inf)

    def act(self) -> None:
        rng, harness = self.rng, self.harness
        now = harness.engine.stats().rounds
        for handle in [handle for handle, until in self.paused.items() if until <= now]:
            self._resume(handle)
        if harness.engine.num_live < MOST_LIVE and rng.random() < 0.1:
            prompt = [rng.randrange(self.vocab_size) for _ in range(rng.choice([3, 30, 200]))]
            mode = rng.choice(
                [SpeculationMode.ON, SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF]
            )
            stop = [rng.randrange(self.vocab_size)]
            sampling = rng.choice(SAMPLINGS)
            name = str(self.submitted)
            self.submitted += 1
            self.handles.append(
                harness.submit(
                    prompt,
                    rng.randrange(1, 200),
                    request_id=name,
                    mode=mode,
                    sampling=sampling,
                    stop=stop,
                    shape=SHAPE,
                )
            )
        if self.handles and rng.random() < 0.01:
            harness.engine.cancel(rng.choice(self.handles))
        if self.handles and rng.random() < 0.01:
            handle = rng.choice(self.handles)
            if handle in self.paused:
                self._resume(handle)
            else:
                self.paused[handle] = now + rng.randrange(1, LONGEST_PAUSE)
                harness.engine.pause(handle)
        if not harness.engine.has_work():  # All live requests are paused, so no round would resume them.
            for handle in list(self.paused):
                self._resume(handle)

    def settle(self) -> None:
        """Run until every request has ended."""
        for handle in list(self.paused):
            self._resume(handle)
        self.handles.clear()
        self.harness.run()
        torch.cuda.synchronize()

    def _resume(self, handle: int) -> None:
        del self.paused[handle]
        self.harness.engine.resume(handle)


def test_ten_thousand_rounds() -> None:
    decoder = load_decoder(TARGET, "cuda", torch.bfloat16)
    drafter = make_pair_drafter(decoder)
    harness = make_harness(
        decoder,
        drafter,
        overlap=OverlapPlan(SIZES, TREE.depth + 1),
        graphs=GraphCache(decoder.device),
        buckets=Buckets(SIZES, NODES),
        num_pages=160,
        max_running=8,
        max_queued=64,
        prefill_chunk=128,
    )
    sizes = [(bs, shape) for bs in reversed(SIZES) for shape in (NO_DRAFT, *OFFERED)]
    records = [record for bs, shape in sizes for record in harness.engine.recordings(bs, shape)]
    compile_ahead(decoder.device, records)
    with harness.runner.graphs.keeping():
        for record in records:
            record()
    graphs_start = len(harness.runner.graphs.keys)
    crowd = Crowd(harness, decoder.config.vocab_size, 0)

    def rounds_until(total: int) -> int:
        while harness.engine.stats().rounds < total:
            crowd.act()
            if harness.engine.has_work():
                harness.engine.step()
        crowd.settle()
        harness.scheduler.check()
        assert harness.scheduler.allocator.held_pages == 0
        return torch.cuda.memory_allocated()

    warm = rounds_until(WARM)
    graphs_warm, bytes_warm = len(harness.runner.graphs.keys), torch.cuda.memory_reserved()
    end = rounds_until(ROUNDS)
    graphs_end, bytes_end = len(harness.runner.graphs.keys), torch.cuda.memory_reserved()
    print(
        f"{crowd.submitted} requests, {harness.engine.stats().rounds} rounds, "
        f"{harness.scheduler.num_retractions} retractions"
    )
    print(f"allocated {warm / 2**20:.1f} -> {end / 2**20:.1f} MiB")
    print(
        f"graphs {graphs_start} -> {graphs_warm} -> {graphs_end}, "
        f"reserved {bytes_warm / 2**20:.0f} -> {bytes_end / 2**20:.0f} MiB"
    )
    assert not harness.sink.failed
    assert len(harness.sink.finished) == crowd.submitted
    new_graphs = graphs_end - graphs_warm
    assert end - warm <= (1 << 20) * (1 + 4 * new_graphs), "memory may grow only by late graphs"
    assert bytes_end - bytes_warm <= MOST_BYTES_PER_GRAPH * (4 + new_graphs)
    assert graphs_end <= MOST_GRAPHS, "sizes must come from a few buckets"
    late = harness.runner.graphs.keys[graphs_start:]
    unforeseen = [key for key in late if key[0] == "round" and SamplingMode.FILTERED not in key]
    assert not unforeseen, "usual graphs must be captured at the start"
    stats = harness.engine.stats().speculation
    identity = sum((accepted + 1) * count for accepted, count in enumerate(stats.histogram))
    emitted = harness.engine.stats().generated_tokens
    by_prefills = emitted - (identity - stats.tokens_cut)
    assert 0 <= by_prefills <= crowd.submitted + harness.scheduler.num_retractions
    drafter.shutdown()
