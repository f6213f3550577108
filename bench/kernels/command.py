"""`outrider bench kernels`: times each kernel against its floor.

A floor is the shortest possible time of a kernel. It is the time to read the kernel's bytes or to do its
operations, at the rates measured on this machine.

Each case is timed in a CUDA graph with several copies of the case's data. Together, the copies are larger
than every cache. The case `forward` is the target's whole pass, and `propose` is a whole round of drafting.
On a CPU, the command runs the reference versions of the kernels in small sizes, as a test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial

import torch

from outrider.bench.kernels.case import KernelCase, KernelOptions, over, small_kernel
from outrider.bench.kernels.choice_cases import choose_cases, mixed_cases
from outrider.bench.kernels.inputs import (
    AttentionInputs,
    KernelSizes,
    attention_inputs,
    copies_for,
    paged,
    sampling,
)
from outrider.bench.kernels.layer_cases import (
    fp8_cases,
    invariant_cases,
    layer_cases,
    norm_cases,
    product_cases,
)
from outrider.bench.kernels.packed_cases import packed_cases
from outrider.bench.kernels.prefill_cases import prefill_cases
from outrider.bench.kernels.ragged_cases import ragged_cases
from outrider.bench.kernels.round_cases import draft_cases, round_cases, trade_cases
from outrider.bench.kernels.rule_cases import rule_cases
from outrider.bench.measure.clock import TimedWork as Call
from outrider.bench.measure.clock import measure
from outrider.bench.measure.floors import Work, draft_step, forward_work
from outrider.bench.measure.roofline import Ceilings, measure_ceilings
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.bench.stacks.draft_stack import drafting_round
from outrider.bench.stacks.random_fit import check_shape_fits
from outrider.kernels.ahead import compile_ahead
from outrider.kernels.kv_compact import kv_compact
from outrider.kernels.kv_store import kv_store
from outrider.kernels.tree_attention import tree_attention
from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.create import create_backend
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.dummy import random_decoder
from outrider.shared.nn.layers.modules import Linear
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.tree import DraftShape


@torch.inference_mode()
def run_kernels(options: KernelOptions) -> int:
    """Run the cases, print the table and save the result. Returns the exit code.

    Raises:
        ConfigurationError: `--only` matches no case, or the weights of the shape do not fit into the memory.
    """
    if any(_is_wanted(kind, options) for kind in PASSES):
        # Only whole passes need all weights. The other cases make the tensors of one layer.
        check_shape_fits(options.shape, options.device, options.dtype, with_head=True)
    ceilings = measure_ceilings(options.device, options.dtype, options.small)
    launch = measure(_launches(options.device), options.device, copies=LAUNCHES).median
    rows: list[Row] = []
    failed: dict[str, str] = {}
    settings = {
        "shape": options.shape.name,
        "device": str(options.device),
        "dtype": str(options.dtype).removeprefix("torch."),
        "read_bandwidth_gbs": round(ceilings.read_bandwidth / 1e9, 1),
        "matrix_rate_tflops": round(ceilings.matrix_rate / 1e12, 2),
        "launch_us": round(launch * 1e6, 3),
    }
    result = Result("kernels", settings, rows, {"failed": failed})
    with Progress("compiling kernels") as progress:
        compile_ahead(options.device, [partial(_rehearse, options)], progress.tell)
    kinds = list(cases(options))
    # A thread that redraws the bar would disturb the measurement.
    with Progress("kernels", len(kinds), still=True) as progress:
        for number, (kind, kind_cases) in enumerate(kinds):
            name = kind
            try:
                for case in kind_cases:
                    name = case.name
                    progress.tell(number, step=name)
                    rows.append(_row(case, options, ceilings, launch))
            except (
                OutriderError,
                RuntimeError,
            ) as error:  # e.g. a step that cannot be captured; the other kinds are still valid
                failed[name] = f"{type(error).__name__}: {error}"[:500]
                print(f"{name} failed: {failed[name]}", file=sys.stderr)
            result.save(options.output)
    if not rows and not failed:
        raise ConfigurationError(
            f"--only {options.only}: no kind of case matches. Kinds: {', '.join(KINDS)}.", field="--only"
        )
    return show_and_save(result, options.output, ("gbs", "tflops")) or int(bool(failed))


def _rehearse(options: KernelOptions) -> None:
    """Call every case once, so that all kernels are compiled in parallel.

    Whole passes are left out, because they compile their kernels by themselves, as the engine does.
    """
    for kind, kind_cases in cases(options):
        if kind not in PASSES:
            for case in kind_cases:
                case.call()


LAUNCHES = 64


def _launches(device: torch.device) -> Call:
    """Return a function that enqueues `LAUNCHES` minimal kernels."""
    x = torch.zeros(32, device=device)
    if device.type == "cuda":
        from outrider.bench.measure.ceiling_kernels import launch_nothing

        return over(range(LAUNCHES), lambda _index: launch_nothing(x))
    return over(range(LAUNCHES), lambda _index: x.add_(1.0))


def _row(case: KernelCase, options: KernelOptions, ceilings: Ceilings, launch: float) -> Row:
    times = measure(case.call, options.device, copies=case.copies)
    if case.work is None:
        return Row(case.name, times.median * 1e6, "us", launch * 1e6, "launch")
    nbytes, flops = case.work.nbytes, case.work.flops
    more = {
        "gbs": round(nbytes / times.median / 1e9, 1),
        "tflops": round(flops / times.median / 1e12, 3),
        "p10": round(times.p10 * 1e6, 3),
        "p90": round(times.p90 * 1e6, 3),
    }
    least = ceilings.seconds(nbytes, flops)
    bound = ceilings.bound(nbytes, flops) if least > launch else "launch"
    return Row(case.name, times.median * 1e6, "us", max(least, launch) * 1e6, bound, more)


def cases(options: KernelOptions) -> Iterator[tuple[str, Iterator[KernelCase]]]:
    """Yield each kind of cases that `--only` selects, with its cases. Each case allocates its data lazily."""
    sizes = KernelSizes.of(
        options.shape.model_config(), options.shape.head, options.device, options.dtype, small=options.small
    )
    for kind, make in KINDS.items():
        if _is_wanted(kind, options):
            yield kind, make(sizes, options)


def _is_wanted(kind: str, options: KernelOptions) -> bool:
    return any(fnmatch(kind, wanted.strip()) for wanted in options.only.split(","))


def _linear(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    for name, (out, width) in sizes.matrices().items():
        nbytes = out * width * sizes.dtype.itemsize
        copies = copies_for(nbytes, options.small)
        layers = [Linear(sizes.random(out, width) * width**-0.5) for _ in range(copies)]
        for rows in sizes.rows:
            x = sizes.random(rows, width)
            moved = nbytes + rows * (out + width) * sizes.dtype.itemsize
            yield KernelCase(
                f"linear {name} {out}×{width}, {rows} rows",
                over(layers, partial(_apply, x)),
                Work(moved, 2.0 * rows * out * width),
                copies,
            )


def _apply(x: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return layer(x)


def _attention(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    for what, batch, rows, context, is_tree in sizes.attention_cases():
        token = 2 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
        copies = copies_for(batch * context * token, options.small)
        planes = [paged(sizes, batch, context + rows) for _ in range(copies)]
        inputs = attention_inputs(sizes, batch, rows, context, is_tree=is_tree)
        seen = context + (rows + 1) / 2
        work = Work(
            batch * (context + rows) * token, 4.0 * sizes.heads * sizes.head_dim * batch * rows * seen
        )

        call = over(planes, partial(_attend, inputs))
        yield KernelCase(f"tree_attention {what}, batch {batch}, context {context}", call, work, copies)


def _attend(inputs: AttentionInputs, planes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return tree_attention(*inputs.before(planes), **inputs.keywords)


def _cache(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    rows, batch = sizes.rows[-1], sizes.batches[-1]
    k, v = (
        sizes.random(rows, sizes.kv_heads, sizes.head_dim),
        sizes.random(rows, sizes.kv_heads, sizes.head_dim),
    )
    k_plane, v_plane = paged(sizes, 1, rows)
    slots = torch.arange(rows, device=sizes.device)
    yield small_kernel(f"kv_store, {rows} rows", partial(kv_store, k, v, k_plane, v_plane, slots))
    planes = [plane for _ in range(sizes.layers) for plane in paged(sizes, batch, 64)]
    table = torch.arange(planes[0].shape[0], dtype=torch.int32, device=sizes.device).view(batch, -1)
    cached = torch.full((batch,), 16, dtype=torch.int32, device=sizes.device)
    path = torch.tensor([[0, 2, 5, 9]], dtype=torch.int32, device=sizes.device).expand(batch, -1).contiguous()
    accepted = torch.full((batch,), 3, dtype=torch.int32, device=sizes.device)
    moved = 2.0 * batch * 3 * len(planes) * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
    yield KernelCase(
        f"kv_compact, {len(planes)} planes, batch {batch}",
        lambda: kv_compact(planes, table, cached, path, accepted),
        Work(moved, 0.0),
    )


def _forward(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield cases of the target's whole passes with logits and token choice.

    Their times are the GPU times of decoding or verifying, without the draft and the host.
    """
    config = options.shape.model_config()
    decoder = random_decoder(config, options.device, options.dtype)
    for batch, rows in sizes.forward_cases():
        context = sizes.context
        pool = decoder.make_pool(batch * -(-(context + rows) // sizes.page_size), sizes.page_size)
        for plane in pool.planes():
            plane.normal_()
        attention = create_backend("auto", options.device)
        attention.plan(sizes.planned(pool, batch, rows, context))
        tokens = torch.randint(0, config.vocab_size, (batch * rows,), device=options.device)
        positions = torch.full((batch * rows,), context, device=options.device)

        greedy = sampling(sizes, batch * rows, 0.0)
        step = _Step(decoder, attention, pool, tokens, positions, greedy)
        yield KernelCase(
            f"forward {rows} rows, batch {batch}, context {context}",
            step,
            forward_work(config, batch * rows, batch, context, decoder.dtype.itemsize),
        )


def _propose(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield drafting passes as the engine enqueues them: extend by the last token, then grow the tree."""
    decoder = random_decoder(options.shape.model_config(), options.device, options.dtype)
    chain, bush = (
        DraftShape(sizes.steps, 1, sizes.steps + 1),
        DraftShape(sizes.steps, sizes.topk, sizes.nodes),
    )
    itemsize = decoder.dtype.itemsize
    for tree in (chain, bush):
        for batch in sizes.batches:
            steps = [
                draft_step(options.shape.head, batch * (tree.topk if step else 1), itemsize)
                for step in range(tree.depth)
            ]
            with drafting_round(decoder, options.shape, tree, batch, sizes.context) as draft:
                work = Work(sum(step.nbytes for step in steps), sum(step.flops for step in steps))
                yield KernelCase(
                    f"propose {tree.depth}/{tree.topk}/{tree.max_nodes}, batch {batch}", draft, work
                )


@dataclass(frozen=True, slots=True)
class _Step:
    """One pass over planned rows, followed by the choice of their tokens."""

    decoder: Decoder
    attention: AttentionBackend
    pool: KVPool
    tokens: torch.Tensor
    positions: torch.Tensor
    how: SamplingTensors

    def __call__(self) -> torch.Tensor:
        output = self.decoder.forward(self.tokens, self.positions, self.attention, self.pool)
        return choose_tokens(self.decoder.logits(output.hidden), self.how, self.positions)


KINDS: dict[str, Callable[[KernelSizes, KernelOptions], Iterator[KernelCase]]] = {
    "linear": _linear,
    "product": product_cases,
    "norm": norm_cases,
    "layer": layer_cases,
    "attention": _attention,
    "prefill": prefill_cases,
    "ragged": ragged_cases,
    "cache": _cache,
    "choose": choose_cases,
    "mixed": mixed_cases,
    "rules": rule_cases,
    "draft": draft_cases,
    "round": round_cases,
    "packed": packed_cases,
    "trade": trade_cases,
    "fp8": fp8_cases,
    "invariant": invariant_cases,
    "forward": _forward,
    "propose": _propose,
}
PASSES = ("forward", "propose")
