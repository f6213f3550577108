"""Finds the compiled variants of Triton kernels that an engine on a CPU would launch on a GPU.

The engine computes with torch. Before each operation, its Triton version is called without a launch. Triton
then reports the variant: types and alignment of the arguments, which integers are 1 or divisible by 16,
constants, and options. Attention uses the sizes for a GPU with few multiprocessors.

Run as a program, the module prints as JSON the variants that a load needs and that the plan of a start lacks,
and those that only the parity check needs. It changes Triton, so it needs a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import pkgutil
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime import JITFunction
from triton.runtime.driver import driver

import outrider.kernels
from outrider.kernels import _dispatch, ahead
from outrider.kernels._launch import outputs_of_zeros
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.warmup import _first_works, _further_works
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.startup.graph_plan import (
    GraphPlan,
    background_works,
    list_graphs,
    other_trees,
)
from outrider.services.target.startup.parity_check import check_parity
from outrider.services.target.startup.warmup import prompt_rehearsals
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.generation import SamplingParams
from outrider.shared.base.logit_rules import LogitRules, LogprobParams
from outrider.shared.engine.buckets import batch_buckets
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.recorded_graph import Parts, finish_parts
from outrider.shared.spec.tree import NO_DRAFT, DraftShape
from support.drafts.draft_pairs import make_pair
from support.engine.target_harness import Harness, make_harness
from support.kernels.rehearse_kernels import AbsentGpu
from support.outputs.mixed_crowd import Crowd, draw_clients

Variant = tuple[str, str, str]
"""Module and name of a kernel, and Triton's key of the variant."""


class KernelVariants:
    """Collects the variants of all kernels that operations would launch, from now on.

    Attributes:
        stage: Name of what runs now. A variant belongs to the first stage that needs it.
        found: Variant → stage.
        parameters: (module, name) of a kernel → the names of its parameters.
    """

    def __init__(self) -> None:
        self.stage = ""
        self.found: dict[Variant, str] = {}
        self.parameters: dict[tuple[str, str], list[str]] = {}
        self._launching = self._rehearsing = False
        driver.set_active(AbsentGpu())  # type: ignore[no-untyped-call]
        knobs.runtime.jit_cache_hook = self._meet
        run = JITFunction.run

        def without_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(kernel, *args, grid=grid, warmup=True, **options)

        JITFunction.run = without_launch
        original = _dispatch.use_triton
        for info in pkgutil.walk_packages(outrider.kernels.__path__, "outrider.kernels."):
            module = importlib.import_module(info.name)
            if getattr(module, "use_triton", None) is original and module is not _dispatch:
                module.use_triton = self._use_triton  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def rehearsal(self, *, all_sizes: bool = False) -> Iterator[None]:
        """Context manager in which operations launch nothing and compute nothing, as in `compile_ahead`."""
        self._rehearsing, ahead._rehearsing = True, threading.get_ident()
        ahead._covered = set() if all_sizes else None
        try:
            with outputs_of_zeros():
                yield
        finally:
            self._rehearsing, ahead._rehearsing = False, None
            ahead._covered = None

    def first_in(self, stage: str) -> list[list[str]]:
        """Return (kernel, difference) of each variant that a stage was the first to need.

        The difference is one from the most similar variant of another stage.
        """
        return sorted(
            [".".join(variant[:2]), self._difference(variant)]
            for variant, found in self.found.items()
            if found == stage
        )

    def _difference(self, variant: Variant) -> str:
        mine, names = _arguments(variant), self.parameters[variant[:2]]
        differences = [
            [
                f"{name}: {own} instead of {other}"
                for name, own, other in zip(names, mine, theirs, strict=True)
                if own != other
            ]
            for theirs in (
                _arguments(one)
                for one, stage in self.found.items()
                if one[:2] == variant[:2] and stage != self.found[variant]
            )
        ]
        return "; ".join(min(differences, key=len)) if differences else "never planned"

    def _meet(self, *, fn: Any, compile: dict[str, Any], **_more: Any) -> bool:
        kernel = (str(fn.module).removeprefix("outrider.kernels."), str(fn.name))
        self.parameters[kernel] = fn.jit_function.arg_names
        self.found.setdefault((*kernel, str(compile["key"])), self.stage)
        return True  # Triton compiles nothing

    def _use_triton(self, _tensor: torch.Tensor) -> bool:
        """Call the operation that asks, with Triton but without launches. Then let its reference compute."""
        if self._launching or self._rehearsing:
            return True
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        caller = frame.f_back
        operation = caller.f_globals[caller.f_code.co_name]
        given = inspect.signature(operation)
        bound = given.bind_partial()
        bound.arguments.update({name: caller.f_locals[name] for name in given.parameters})
        self._launching, ahead._rehearsing = True, threading.get_ident()
        try:
            with outputs_of_zeros():
                operation(*bound.args, **bound.kwargs)
        finally:
            self._launching, ahead._rehearsing = False, None
        return False


def _arguments(variant: Variant) -> list[Any]:
    """Return the specialisation of each argument of a variant, in the order of the parameters."""
    text = variant[2]
    return list(ast.literal_eval(text[: text.rindex("]{") + 1]))


class NoGraphs(GraphCache):
    """Counts as enabled, so that passes are padded as on a GPU, but always runs the work itself."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.enabled = True
        self._captured: set[Hashable] = set()

    def replays(self, key: Hashable) -> bool:
        return key in self._captured

    def due(self, key: Hashable, counted_as: Hashable | None = None) -> bool:
        return key in self._captured

    def capture_parts(self, key: Hashable, record: Callable[[], Parts[Any]]) -> None:
        if ahead.rehearsing():  # as in `GraphCache`
            finish_parts(record())
        elif key not in self._captured:
            self._captured.add(key)
            finish_parts(record())

    def run(self, key: Hashable, record: Callable[[], Any]) -> Any:
        return record()

    def run_parts(self, key: Hashable, record: Callable[[], Parts[Any]]) -> Parts[Any]:
        return record()


RUNNING = 4
SHAPES = ((5, 4, 16), (5, 1, 6), (5, 8, 41), (4, 2, 9), (3, 1, 4), (2, 3, 7))
"""Trees of the load: the default ones and others that clients ask for."""
RULES = SamplingParams(temperature=0.8, top_p=0.9, seed=4, rules=LogitRules(0.4, 0.3, 1.2))


def compile_plan(variants: KernelVariants, harness: Harness) -> None:
    """Run all passes whose kernels a start plans to compile, at once or while it is idle."""
    tree = DraftShape(5, 4, 16)
    plan = GraphPlan(
        graphs=True,
        loop=LoopPlan(),
        batch_sizes=batch_buckets(RUNNING),
        shapes=(NO_DRAFT, tree, DraftShape(5, 1, 6)),
        forms=(tree, DraftShape(8, 1, 9)),
        prefills=(16, 32, 64),
        other_trees=other_trees(tree, 8, 128),
    )
    variants.stage = "plan"
    recordings, prompts = harness.engine.recordings, prompt_rehearsals(harness.runner)
    listed = list_graphs(recordings, plan)
    for work in [*prompts, *(record for _, record in (*listed.first, *listed.further))]:
        work()
    for works, all_sizes in background_works(recordings, plan, prompts):
        with variants.rehearsal(all_sizes=all_sizes):
            for rehearse in works:
                rehearse()


def main(kind: str) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    variants = KernelVariants()
    variants.stage = "draft"
    with tempfile.TemporaryDirectory() as folder:
        pair = make_pair(kind, Path(folder), attention_backend="triton")
        drafter = drafter_beside(pair.decoder, pair.settings)
    gpu = torch.device("cuda")  # the draft only reads the kind of the device
    for work in [*_first_works(drafter._engine, gpu), *_further_works(drafter._engine, gpu, record=False)]:
        work()
    loop = LoopPlan(lookahead=1, drafts_on_device=True, max_depth=8, recorded_entries=RUNNING)
    harness = make_harness(
        pair.decoder,
        drafter,
        plan=loop,
        graphs=NoGraphs(),
        attention=KernelAttention(),
        prefill_sizes=(16, 32, 64),
        max_running=RUNNING,
        max_queued=64,
        prefill_chunk=64,
    )
    compile_plan(variants, harness)
    planned = len(variants.found)
    variants.stage = "load"
    vocab_size = pair.decoder.config.vocab_size
    clients = draw_clients(random.Random(5), 24, vocab_size, most_tokens=20, shapes=SHAPES)
    for index, client in enumerate(clients[:4]):
        harness.submit(
            client.prompt,
            12,
            request_id=f"rules {index}",
            sampling=RULES,
            mode=client.mode,
            shape=client.shape,
            logprobs=LogprobParams(top=index),
        )
    Crowd(harness, random.Random(3), most_live=RUNNING, haste=0.7).run(clients)
    rounds = harness.engine.stats().rounds
    variants.stage = "parity"
    check_parity(harness.runner, harness.engine.step_runner)
    late, of_check = variants.first_in("load"), variants.first_in("parity")
    json.dump({"planned": planned, "rounds": rounds, "late": late, "of_check": of_check}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
