"""Finds the variants of kernels that loads need and that a start does not compile, for heads of real sizes.

The models are narrow, but their attention has the heads of an 8B model in bf16, so attention chooses its
block sizes as for such a model on a GPU with 132 multiprocessors. Every pass is rehearsed: it launches and
computes nothing.

Run as a program with the kind of the draft, the module prints as JSON the number of variants that a start
compiles, and those that each load needs in addition. It changes Triton and the models, so it needs a process
of its own.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from outrider.kernels.tree_attention import triton as attention_kernels
from outrider.kernels.tree_attention import work as attention_work
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.heads import eagle3
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.warmup import WARM_UP_PEER, _first_works, _further_works
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.packed_batch import SamplingMode
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.startup.graph_plan import GraphPlan, background_works, other_trees
from outrider.services.target.startup.trial_sequences import release, trial_sequence
from outrider.services.target.startup.warmup import prompt_rehearsals
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.engine.buckets import batch_buckets
from outrider.shared.nn import decoder as decoders
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import NO_DRAFT, DraftShape
from support.engine.target_harness import Harness, make_harness
from support.kernels.kernel_signatures import KernelVariants, NoGraphs
from support.models.toys import make_toy_eagle3, make_toy_target

PROCESSORS, RUNNING = 132, 64
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
CONTEXT = 16384
TREE, CHAIN = DraftShape(5, 4, 16), DraftShape(5, 1, 6)
Chunk = tuple[int, int]
"""Numbers of cached tokens and of new tokens of a sequence."""


def passes() -> list[list[Chunk]]:
    """Return passes of different numbers of sequences, cached tokens and new tokens."""
    rng, found = random.Random(1), []
    for cached, sequences, first, others in (
        *((0, 1, new, 0) for new in (4, 65)), (0, 9, 1, 1), (0, 9, 2, 1), (0, 9, 5, 1), (0, 17, 4, 4),
        *((100, 1, new, 0) for new in (1, 4, 5, 17, 33, 128)), (100, 2, 1, 1), (100, 2, 2, 1),
        (100, 3, 16, 16), *((300, 1, new, 0) for new in (1, 4, 17, 33)), (300, 2, 1, 1), (300, 2, 2, 1),
        (300, 5, 1, 1), (600, 1, 1, 0), (600, 1, 4, 0), (2000, 1, 4, 0),
        *((2000, count, 1, 1) for count in (2, 3, 4)), (2000, 2, 2, 1), (8000, 1, 17, 0), (8000, 2, 1, 1),
        (8000, 2, 2, 1),
    ):  # fmt: skip
        found.append([(cached, first), *[(cached, others)] * (sequences - 1)])
    for _ in range(16):
        rows = rng.choice([1, 2, 5, 16, 17, 40, 64, 100, 600])
        sequences = rng.choice([1, 2, 3, 4, 7, 16, 33])
        cached = [rng.choice([0, 16, 100, 300, 1500]) for _ in range(sequences)]
        found.append([(one, rng.randint(1, rows)) for one in cached])
    return found


def prefill(harness: Harness, chunks: Sequence[Chunk]) -> None:
    """Run one pass over prompts without CUDA graphs."""
    sequences = [trial_sequence(harness.runner, index, sum(chunk)) for index, chunk in enumerate(chunks)]
    harness.runner.prefill(
        [
            PrefillChunk(sequence, cached, cached + new)
            for sequence, (cached, new) in zip(sequences, chunks, strict=True)
        ]
    )
    for sequence in sequences:
        release(sequence)


def catch_up(engine: DraftEngine, chunks: Sequence[Chunk]) -> None:
    """Let sessions that have fallen behind catch up together."""
    size = engine.strategy.info.feature_size
    for index, (cached, new) in enumerate(chunks):
        tokens = [1] * (cached + new + 1)
        fence = Fence(index, 1, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))
        engine.open(WARM_UP_PEER, SequenceOpen(fence, tokens, seed=0, temperature=0.0))
        session = engine.sessions.get(WARM_UP_PEER, index)
        assert session is not None
        if size and cached:
            engine.add_features(WARM_UP_PEER, index, 1, 0, torch.ones(cached, size))
            engine.catch_up(WARM_UP_PEER, [index])
        elif cached:  # a model without features would compute all its tokens
            engine.strategy.reserve(session)
            session.cached_rows = cached
    for index, (cached, new) in enumerate(chunks if size else ()):
        engine.add_features(WARM_UP_PEER, index, 1, cached, torch.ones(new, size))
    engine.catch_up(WARM_UP_PEER, range(len(chunks)))
    engine.drop_peer(WARM_UP_PEER)


def make_models(folder: Path, kind: str) -> tuple[Harness, DraftEngine]:
    """Make an engine and its draft, which runs in the same process, with the code paths of a GPU.

    The draft is an EAGLE-3 head, or a standalone model with the same heads.
    """
    attention_kernels.processors = attention_work.processors = lambda _device: PROCESSORS  # type: ignore[assignment]
    decoders.can_fuse = lambda *_model: True  # type: ignore[assignment]
    eagle3.runs_fused = lambda *_model: True  # type: ignore[assignment]
    sizes = {"vocab_size": 4096, "max_position_embeddings": CONTEXT, **HEADS}
    target = make_toy_target(folder / "target", num_layers=5, **sizes)
    draft = (
        make_toy_target(folder / "draft", num_layers=2, **sizes)
        if kind == "STANDALONE"
        else make_toy_eagle3(
            folder / "draft", target, config_overrides={"max_position_embeddings": CONTEXT}, **HEADS
        )
    )
    decoder = load_decoder(target, torch.device("cpu"), torch.bfloat16)
    given = {"draft": draft, "target_weights": target, "speculative_algorithm": kind}
    where = {"device": "cpu", "threads": 1, "kv_tokens": 4 * CONTEXT, "attention_backend": "triton"}
    drafter = drafter_beside(decoder, DraftSettings.load({**given, **where}))
    loop = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=8, recorded_entries=RUNNING)
    harness = make_harness(
        decoder, drafter, plan=loop, graphs=NoGraphs(), attention=KernelAttention(), num_pages=6000,
        max_model_len=CONTEXT, max_running=RUNNING,
    )  # fmt: skip
    return harness, drafter._engine


def start(variants: KernelVariants, harness: Harness, engine: DraftEngine) -> None:
    """Run all passes whose kernels a start compiles, at once or in the background."""
    gpu = torch.device("cuda")  # the draft only reads the kind of the device
    run(variants, [*_first_works(engine, gpu), *_further_works(engine, gpu, record=False)])
    plan = GraphPlan(
        graphs=True, loop=LoopPlan(), batch_sizes=batch_buckets(RUNNING), shapes=(NO_DRAFT, TREE, CHAIN),
        forms=(TREE, DraftShape(8, 1, 9)), prefills=(), other_trees=other_trees(TREE, 4, 128),
    )  # fmt: skip
    recordings, prompts = harness.engine.recordings, prompt_rehearsals(harness.runner)
    run(variants, [*prompts, *(record for _, record in recordings.rounds(plan.first_batches))])
    for works, all_sizes in background_works(recordings, plan, prompts):
        run(variants, works, all_sizes=all_sizes)


def run(variants: KernelVariants, works: Iterable[Callable[[], object]], *, all_sizes: bool = False) -> None:
    """Rehearse works."""
    with variants.rehearsal(all_sizes=all_sizes):
        for work in works:
            work()


def main(kind: str) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    variants = KernelVariants()
    variants.stage = "before"
    with tempfile.TemporaryDirectory() as folder:
        harness, engine = make_models(Path(folder), kind)
    variants.found.clear()
    variants.stage = "start"
    start(variants, harness, engine)
    planned = len(variants.found)
    recordings = harness.engine.recordings
    trees = [TREE, *(DraftShape(depth, 1, depth + 1) for depth in (1, 3, 5, 8))]
    batches = [(size, shape) for size in batch_buckets(RUNNING) for shape in trees]
    loads: dict[str, list[Callable[[], object]]] = {
        "prompts": [lambda chunks=chunks: prefill(harness, chunks) for chunks in passes()],  # type: ignore[misc]
        "catch-ups": [lambda chunks=chunks: catch_up(engine, chunks) for chunks in passes()],  # type: ignore[misc]
        "rounds": [record for _, record in recordings.mixed([SamplingMode.GREEDY])],
        "drafts": [record for _, record in recordings.rounds(batches, [SamplingMode.GREEDY])],
    }
    late = {}
    for name, works in loads.items():
        variants.stage = name
        run(variants, works)
        late[name] = variants.first_in(name)
        for variant in [one for one, stage in variants.found.items() if stage == name]:
            del variants.found[variant]  # another load may need it, too
    json.dump({"planned": planned, "late": late}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
