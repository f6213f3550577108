"""Tests of the number of kernels in a round of the embedded pair at batch 1.

Each launch costs about 2 us. Without a test, the number would grow unnoticed.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.drafts.gpu_pair import TARGET, make_pair_drafter
from support.engine.target_harness import make_harness
from torch.profiler import ProfilerActivity, profile

from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.open import load_decoder

pytestmark = pytest.mark.gpu

PROMPT = [5, 9, 14, 3, 77, 21, 8]
ONCE_A_ROUND = "_place"
"""Start of the name of the kernel that locates the packed rows. Each round launches it once."""
MOST = {None: 86, (5, 4, 16): 148, (5, 1, 6): 144}
"""Maximum number of kernels and copies in a plain round and in tree rounds. Lower a number when it falls."""


@pytest.mark.parametrize("shape", list(MOST))
def test_rounds_stay_as_short_as_they_are(shape: tuple[int, int, int] | None) -> None:
    decoder = load_decoder(TARGET, "cuda", torch.bfloat16)
    graphs = GraphCache(decoder.device)
    plan = LoopPlan(lookahead=1, drafts_on_device=True)
    harness = make_harness(decoder, make_pair_drafter(decoder), plan=plan, graphs=graphs)
    mode = SpeculationMode.OFF if shape is None else SpeculationMode.ON

    def answer(name: str) -> None:
        harness.submit(PROMPT, 64, request_id=name, mode=mode, shape=shape or (5, 4, 16), ignore_eos=True)
        harness.run()
        torch.cuda.synchronize()

    answer("recorded")
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        answer("counted")
    events = recording.profiler.kineto_results.events()
    launches = sorted(
        (event.start_ns(), event.name()) for event in events if event.device_type().name == "CUDA"
    )
    starts = [index for index, (_, name) in enumerate(launches) if name.startswith(ONCE_A_ROUND)]
    assert len(starts) > 8, "each round must locate its rows"
    rounds = [later - earlier for earlier, later in itertools.pairwise(starts[2:-1])]
    usual = max(set(rounds), key=rounds.count)
    print(f"{shape}: {usual} launches a round")
    assert usual <= MOST[shape], sorted(name for _, name in launches[starts[3] : starts[4]])
