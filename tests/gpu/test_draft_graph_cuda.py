"""Tests of drafting on a GPU: captured rounds, eager rounds, and separate extend and grow are equal."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.drafts.drafter_rig import Rig, check_mixture, host_round, open_streams
from support.models import toy_mtp
from support.models.toy_heads import HIDDEN, VOCAB, base_config, eagle_tensors, write_head
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.services.draft.build import build_engine
from outrider.services.draft.growth.draft_graph import DeviceGrowth
from outrider.services.draft.growth.tree_grower import GrowthInputs, GrowthSize
from outrider.services.draft.inproc import InprocDrafter
from outrider.services.draft.settings import DraftSettings
from outrider.shared.engine import graphs
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.spec.tree import DraftShape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from guards import Guards
from input_cases import check_head_input
from level_cases import check_expand_level
from plan_cases import check_round_plan

from outrider.kernels.head_input import Residual

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SHAPES = [DraftShape(5, 8, 32), DraftShape(3, 1, 4), DraftShape(1, 4, 3), DraftShape(4, 3, 9)]
MTP_LAYERS = (1, 3)
ALGORITHMS = ["EAGLE3", "EAGLE", "STANDALONE", *(f"MTP {n}" for n in MTP_LAYERS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    target = make_toy_target(folder / "target", vocab_size=VOCAB, hidden_size=HIDDEN)
    return {
        "target": target,
        "EAGLE3": make_toy_eagle3(folder / "eagle3", target, draft_vocab_size=24),
        "EAGLE": write_head(folder / "eagle", base_config() | {"bias": True}, eagle_tensors()),
        "STANDALONE": make_toy_target(
            folder / "small", vocab_size=VOCAB, hidden_size=32, num_layers=2, head_dim=16, seed=4
        ),
        **{f"MTP {n}": toy_mtp.save(toy_mtp.sharp_model(n), folder / f"mtp{n}") for n in MTP_LAYERS},
    }


@pytest.fixture(params=ALGORITHMS)
def make_rig(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Callable[[bool], Rig]:
    def make(in_one_go: bool) -> Rig:
        algorithm = request.param.split()[0]  # the number after MTP is that of the layers
        names = {"draft": folders[request.param], "target_weights": folders["target"]}
        if algorithm == "MTP":
            names = {"target_weights": folders[request.param]}
        sizes = {"device": "cuda", "dtype": "float32", "kv_tokens": 4096, "page_size": 4}
        settings = DraftSettings.load({**names, "speculative_algorithm": algorithm, **sizes})
        engine = build_engine(settings, CUDA, torch.float32)
        growth, spec = engine.strategy.growth, engine.strategy.feature_spec(None)
        assert growth is not None
        assert growth.host is not None
        if not in_one_go:
            engine.strategy.growth = DeviceGrowth(growth.memory, None)
        vocab_size = engine.strategy.info.vocab_size
        return Rig(InprocDrafter(engine, spec, CUDA), spec.feature_size, CUDA, vocab_size, GraphCache(CUDA))

    return make


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_mixture_of_rounds_drafts_the_same(make_rig: Callable[[bool], Rig], shape: DraftShape) -> None:
    mixed = make_rig(True)
    check_mixture(make_rig(False), mixed, shape)
    assert mixed.graphs.keys


def test_rounds_that_the_host_starts_are_recorded_and_draft_the_same(
    make_rig: Callable[[bool], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "RECORD_AFTER", 1)
    plain, rig = make_rig(False), make_rig(True)
    growth = rig.drafter._engine.strategy.growth
    assert growth is not None
    assert growth.host is not None
    streams, twins = open_streams(plain, rig)
    source = random.Random(2)
    for shape in SHAPES * 3:
        host_round(plain, streams, rig, twins, shape, source)
    assert len(growth.host._graphs.keys) == len(SHAPES)
    for one in (plain, rig):
        one.drafter.shutdown()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_recorded_round_equals_an_eager_one(
    make_rig: Callable[[bool], Rig], shape: DraftShape, temperature: float
) -> None:
    """One captured graph serves contexts and fresh rows of all lengths, with bitwise equal results."""
    strategy = make_rig(True).drafter._engine.strategy
    assert strategy.growth is not None
    grower = strategy.growth.memory.grower
    bs, size = 5, GrowthSize.of(5, shape)
    inputs = GrowthInputs(
        committed_lens=torch.ones(bs, dtype=torch.int32, device=CUDA),
        counts=torch.zeros(bs, dtype=torch.int32, device=CUDA),
        tokens=torch.zeros((bs, size.rows), dtype=torch.int32, device=CUDA),
        features=torch.zeros((bs, size.rows, strategy.info.feature_size), device=CUDA),
        max_nodes=torch.full((bs,), size.nodes, dtype=torch.int32, device=CUDA),
        page_table=torch.arange(bs * 32, dtype=torch.int32, device=CUDA).view(bs, 32),
        places=torch.arange(bs, dtype=torch.int32, device=CUDA) * 32,
        temperature=torch.full((bs,), temperature, device=CUDA),
        seeds=torch.arange(bs, device=CUDA) * 991,
        choices=torch.zeros(bs, dtype=torch.int32, device=CUDA),
    )
    graphs = GraphCache(CUDA)
    pool, kept = strategy._pool, grower.stage_states  # type: ignore[attr-defined]
    memory = [*pool.planes(), *([] if kept is None else [kept._states, kept._rows])]
    with torch.inference_mode():
        graphs.capture(size, lambda: grower.draft(inputs, size))
        assert not any(bool(plane.any()) for plane in pool.planes()), "the capture wrote into the pool"
        for plane in pool.planes():
            plane.normal_()
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            inputs.counts.copy_(torch.randint(0, size.rows + 1, (bs,), generator=generator))
            inputs.committed_lens.copy_(torch.randint(size.rows + 1, 70, (bs,), generator=generator))
            inputs.tokens.copy_(
                torch.randint(0, strategy.info.vocab_size, inputs.tokens.shape, generator=generator)
            )
            inputs.features.copy_(torch.randn(inputs.features.shape, generator=generator))
            before = [part.clone() for part in memory]
            eager = grower.draft(inputs, size).trees
            eager_planes = [plane.clone() for plane in pool.planes()]
            for part, was in zip(memory, before, strict=True):
                part.copy_(was)
            replayed = graphs.run(size, lambda: grower.draft(inputs, size)).trees
            for name in ("tokens", "parents", "depths", "num_nodes", "ancestors", "logprobs"):
                assert torch.equal(getattr(replayed, name), getattr(eager, name)), name
            assert all(
                torch.equal(have, want) for have, want in zip(pool.planes(), eager_planes, strict=True)
            )
            assert bool((eager.num_nodes[inputs.counts == 0] == 1).all())
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            graphs.run(size, lambda: grower.draft(inputs, size))
        torch.cuda.synchronize()
        print(
            f"{strategy.info.algorithm} {shape}: {(time.perf_counter() - began) * 50:.3f} ms a round of {bs}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("coupled", "mapped"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("bs", "vocab", "topk", "depth"),
    [
        *((1, 32000, 8, 5), (16, 32000, 8, 3), (64, 32000, 1, 4), (3, 128256, 4, 3)),
        *(
            (1, 2048, 4, 5),
            (5, 4096, 4, 3),
            (2, 2000, 8, 3),
            (4, 2048, 1, 6),
            (3, 700, 16, 3),
        ),  # One launch per level.
    ],
)
def test_expand_level(
    dtype: torch.dtype, coupled: bool, mapped: bool, bs: int, vocab: int, topk: int, depth: int
) -> None:
    check_expand_level(
        "cuda", dtype, bs, vocab, topk, depth, coupled=coupled, mapped=mapped, guards=Guards(64)
    )


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize(
    ("bs", "rows", "depth", "topk", "page_size"), [(1, 6, 5, 8, 16), (64, 4, 3, 1, 16), (7, 17, 16, 16, 3)]
)
def test_round_plan(bs: int, rows: int, depth: int, topk: int, page_size: int, lead: int) -> None:
    check_round_plan("cuda", bs, rows, depth, topk, page_size, lead, Guards(67))


@pytest.mark.parametrize("behind", [1, 3, 40])
def test_round_plan_of_a_later_stage(behind: int) -> None:
    check_round_plan("cuda", 7, 6, 5, 4, 3, 0, Guards(67), behind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("residual", list(Residual))
def test_head_input(dtype: torch.dtype, gathered: bool, residual: Residual) -> None:
    for count, hidden in ((1, 4096), (48, 2880), (5, 37)):
        check_head_input(
            "cuda",
            dtype,
            count,
            hidden,
            norms=(True, True),
            gathered=gathered,
            residual=residual,
            guards=Guards(64),
        )
