"""`outrider bench`: defines the commands and their flags.

Each command imports its measuring code only when it runs, so that `--help` stays fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.fault_commands import move, overload, soak, stall
from outrider.bench.form_command import forms
from outrider.bench.load_commands import mixed, prefix, serve
from outrider.bench.options import (
    AnswerTokens,
    Device,
    DraftDir,
    Dtype,
    Force,
    NumPrompts,
    Output,
    Prompts,
    Shape,
    StackTransport,
    TargetDir,
    choice,
    device_and_dtype,
    draft_folder,
    numbers,
    result_file,
)
from outrider.bench.plot.command import plot
from outrider.services.hub.pair import DEMO_TARGET
from outrider.services.stack.options import Transport
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.lifecycle import leave_on_terminate
from outrider.shared.obs.progress import importing
from outrider.shared.rpc.polling import watch_sockets

bench = typer.Typer(
    help="Measure this machine and this build. Every figure is saved to JSON, with its floor.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

RESULTS = Path("bench/results")
BATCHES = "1,4,16,64"
ROUNDS = "plain,chain3@2.4,chain5@2.6"


@bench.callback()
def bench_default(
    context: typer.Context,
    prompts: Prompts = None,
    num_prompts: NumPrompts = 40,
    tokens: AnswerTokens = 128,
    target: TargetDir = None,
    draft: DraftDir = None,
    device: Device = "auto",
    transport: StackTransport = Transport.AUTO,
    output: Output = None,
    force: Force = False,
) -> None:
    """Measure this machine and this build. Without a command, run `speculation` with the flags below."""
    if context.invoked_subcommand is None:
        _speculation(prompts, num_prompts, tokens, target, draft, device, transport, output, force)


@bench.command()
def speculation(
    prompts: Prompts = None,
    num_prompts: NumPrompts = 40,
    tokens: AnswerTokens = 128,
    target: TargetDir = None,
    draft: DraftDir = None,
    device: Device = "auto",
    transport: StackTransport = Transport.AUTO,
    output: Output = None,
    force: Force = False,
) -> None:
    """Compare speculative with plain decoding, prompt by prompt, end to end at batch 1 (real acceptance)."""
    _speculation(prompts, num_prompts, tokens, target, draft, device, transport, output, force)


def _speculation(
    prompts: Path | None,
    num_prompts: int,
    tokens: int,
    target: Path | None,
    draft: str | None,
    device: str,
    transport: Transport,
    output: Path | None,
    force: bool,
) -> None:
    with importing():
        from outrider.bench.measure.speculation import BenchOptions, run_bench
        from outrider.bench.report.machine import describe_machine

    leave_on_terminate()
    folder = draft_folder(target, draft)
    if folder is None:
        raise ConfigurationError(
            "Without a draft there is nothing to compare. Give --draft DIR.", field="--draft"
        )
    options = BenchOptions(
        prompts,
        num_prompts,
        tokens,
        target or DEMO_TARGET,
        folder,
        device,
        result_file(output, "speculation", "cuda" if describe_machine()["gpus"] else "cpu", force),
        transport,
    )
    raise typer.Exit(run_bench(options))


@bench.command()
def latency(
    shape: Shape = "llama3.1-8b",
    rounds: Annotated[
        str,
        typer.Option(
            help="Kinds of rounds: plain, chain5, or steps/topk/nodes such as 5/8/32. Append @3.5 for its "
            "own accept length and :1+16 for its own batch sizes."
        ),
    ] = ROUNDS,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = BATCHES,
    accept_length: Annotated[
        float,
        typer.Option(help="Synthetic accept length of rounds that give none, including the bonus token."),
    ] = 3.5,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=3, help="Tokens per answer.")] = 384,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per row; the fastest one counts.")] = 2,
    prefill: Annotated[str, typer.Option(help="Prompt lengths to measure prefill with, or `none`.")] = "2048",
    transport: Annotated[
        str, typer.Option(help="How the target reaches the draft: inproc, ipc, grpc (loopback) or unix.")
    ] = "inproc",
    draft_device: Annotated[
        str | None,
        typer.Option(
            help="Device of a draft in its own process (--transport ipc, grpc or unix).",
            show_default="the target's",
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree of the target.")] = 1,
    mps: Annotated[
        bool,
        typer.Option("--mps", help="Share the GPU through NVIDIA MPS, started for this run."),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(help="On a GPU, record the kernels of some rounds: idle shares and a kernel table."),
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE for a setting of `outrider serve target`; repeatable."),
    ] = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Time rounds and prefill of an in-process engine: random weights, synthetic acceptance, wall clock."""
    watch_sockets()
    with importing():
        from outrider.bench.measure.latency import LatencyOptions, parse_shapes, run_latency
        from outrider.bench.stacks.engine_stack import EngineOptions, parse_settings
        from outrider.bench.stacks.remote_draft import DraftTransport
        from outrider.bench.stacks.shapes import named_shape
        from outrider.shared.obs.logging import configure_logging

    leave_on_terminate()
    configure_logging("bench", "warning")
    shapes = parse_shapes([text.strip() for text in rounds.split(",")], accept_length)
    batches = numbers(batch, "--batch")
    prefills = [] if prefill == "none" else numbers(prefill, "--prefill")
    known = {kind.value: kind for kind in DraftTransport}
    if transport not in known:
        raise ConfigurationError(
            f"--transport {transport}: expected one of {', '.join(known)}.", field="--transport"
        )
    trees = [kind.tree for kind in shapes if kind.tree]
    nodes = max((tree.max_nodes for tree in trees), default=1)
    engine = EngineOptions(
        shape=named_shape(shape),
        device=device,
        dtype=dtype,
        transport=known[transport],
        max_batch=max([*batches, *(size for kind in shapes for size in kind.batches)]),
        max_len=max(prompt + new_tokens, *prefills, 1) + nodes + 1,
        trees=trees,
        draft_device=draft_device,
        tp=tp,
        settings=parse_settings(set_ or []),
    )
    # With --mps, this process must not initialise CUDA before the MPS service runs. --mps needs a GPU in any
    # case.
    kind = "cuda" if mps else device_and_dtype(device, "auto")[0].type
    path = result_file(output, "latency", kind, force)
    raise typer.Exit(
        run_latency(
            LatencyOptions(engine, shapes, batches, prompt, new_tokens, repeats, prefills, profile, path, mps)
        )
    )


@bench.command()
def auto(
    shape: Shape = "llama3.1-8b",
    rounds: Annotated[
        str, typer.Option(help="Fixed choices to compare with, as in `bench latency`, without @ and :.")
    ] = "plain,chain3,chain5,5/8/32",
    accept_length: Annotated[
        str,
        typer.Option(
            help="Synthetic accept lengths of chains of 5, from 1 (no draft is ever right; the ratio is then "
            "auto ÷ off) to 6."
        ),
    ] = "1,1.2,2.5,4",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = BATCHES,
    new_tokens: Annotated[str, typer.Option(help="Tokens per answer.")] = "256,1500",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")] = 128,
    pairs: Annotated[int, typer.Option(min=1, help="Measurements of each choice; medians count.")] = 5,
    transport: Annotated[
        str, typer.Option(help="How the target reaches the draft: inproc, ipc, grpc (loopback) or unix.")
    ] = "inproc",
    device: Device = "auto",
    dtype: Dtype = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE for a setting of `outrider serve target`; repeatable."),
    ] = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Compare mode auto with plain decoding and fixed shapes: random weights, synthetic acceptance."""
    watch_sockets()
    with importing():
        from outrider.bench.measure.auto import AutoOptions, parse_accept_lengths, run_auto
        from outrider.bench.measure.latency import parse_shapes
        from outrider.bench.stacks.engine_stack import EngineOptions, parse_settings
        from outrider.bench.stacks.remote_draft import DraftTransport
        from outrider.bench.stacks.shapes import named_shape
        from outrider.shared.obs.logging import configure_logging

    leave_on_terminate()
    configure_logging("bench", "warning")
    shapes = parse_shapes([text.strip() for text in rounds.split(",")], 1.0)
    trees = [kind.tree for kind in shapes if kind.tree]
    if not trees or len(trees) == len(shapes):
        raise ConfigurationError(
            f"--rounds {rounds}: give plain and at least one shape with drafts.", field="--rounds"
        )
    batches, lengths = numbers(batch, "--batch"), numbers(new_tokens, "--new-tokens")
    choice(transport, [kind.value for kind in DraftTransport], "--transport")
    engine = EngineOptions(
        shape=named_shape(shape),
        device=device,
        dtype=dtype,
        transport=DraftTransport(transport),
        max_batch=max(batches),
        max_len=prompt + max(lengths) + max(tree.max_nodes for tree in trees) + 1,
        trees=trees,
        settings=parse_settings(set_ or []),
    )
    accept_lengths = parse_accept_lengths(accept_length)
    path = result_file(output, "auto", device_and_dtype(device, "auto")[0].type, force)
    raise typer.Exit(
        run_auto(AutoOptions(engine, shapes, accept_lengths, batches, lengths, prompt, pairs, path))
    )


bench.command()(forms)
bench.command()(serve)
bench.command()(mixed)
bench.command()(prefix)
bench.command()(move)
bench.command()(overload)
bench.command()(soak)
bench.command()(stall)
bench.command()(plot)


@bench.command()
def kernels(
    shape: Shape = "llama3.1-8b",
    only: Annotated[
        str,
        typer.Option(
            help="Kinds of cases, as comma-separated patterns: linear (the library's products), product, "
            "fp8, norm, layer, attention, prefill (attention of long prompts), ragged, cache, choose, draft, "
            "round, trade, invariant, forward, propose."
        ),
    ] = "*",
    tune: Annotated[
        bool,
        typer.Option(help="Only try tiles that have no measurement yet, and save them for later starts."),
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Time each kernel and the target's whole pass against its floor. On a CPU, test the references."""
    with importing():
        from outrider.bench.kernels.case import KernelOptions
        from outrider.bench.kernels.command import run_kernels
        from outrider.bench.stacks.shapes import named_shape
        from outrider.shared.obs.logging import configure_logging

    configure_logging("bench", "warning")
    where, how = device_and_dtype(device, dtype)
    path = result_file(output, "tiles" if tune else "kernels", where.type, force)
    options = KernelOptions(named_shape(shape), where, how, only, path)
    if tune:
        from outrider.bench.kernels.tune import tune_tiles

        raise typer.Exit(tune_tiles(options))
    raise typer.Exit(run_kernels(options))


@bench.command()
def roofline(
    device: Device = "auto",
    dtype: Dtype = "auto",
    small: Annotated[bool, typer.Option("--small", help="Use small sizes, for tests.")] = False,
    output: Output = None,
    force: Force = False,
) -> None:
    """Measure the machine's own ceilings: copies, reads, the matrix rate, launches and the bus."""
    with importing():
        from outrider.bench.measure.roofline import RooflineOptions, run_roofline

    where, how = device_and_dtype(device, dtype)
    path = result_file(output, "roofline", where.type, force)
    raise typer.Exit(run_roofline(RooflineOptions(where, how, path, small)))


@bench.command()
def perplexity(
    text: Annotated[
        Path,
        typer.Option(
            help="A text file, or JSON lines with text, prompt, question or answer fields.", metavar="FILE"
        ),
    ],
    target: TargetDir = None,
    quantization: Annotated[str, typer.Option(help="none or fp8, as for `outrider serve target`.")] = "none",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto or fp8_e4m3, as for `outrider serve target`.")
    ] = "auto",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to count.")] = 100_000,
    window: Annotated[int, typer.Option(min=2, help="Tokens per pass; each pass is its own context.")] = 512,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Measure the quality cost of FP8: perplexity on a text, without and with the selected quantization."""
    with importing():
        from outrider.bench.measure.perplexity import PerplexityOptions, run_perplexity
        from outrider.shared.obs.logging import configure_logging

    configure_logging("bench", "warning")
    choice(quantization, ("none", "fp8"), "--quantization")
    choice(kv_cache_dtype, ("auto", "fp8_e4m3"), "--kv-cache-dtype")
    where, how = device_and_dtype(device, dtype)
    path = result_file(output, "perplexity", where.type, force)
    options = PerplexityOptions(
        text, target or DEMO_TARGET, where, how, quantization, kv_cache_dtype, tokens, window, path
    )
    raise typer.Exit(run_perplexity(options))


@bench.command()
def table(
    results: Annotated[Path, typer.Option(help="Folder of JSON results.")] = RESULTS,
    document: Annotated[
        Path | None,
        typer.Option(
            help="Write the tables between the markers of this file, e.g. docs/performance.md.",
            show_default="standard output",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing. Exit with code 1 if the document is out of date.")
    ] = False,
) -> None:
    """Make the tables of docs/performance.md, docs/numerics.md and README.md from recorded results."""
    from outrider.bench.report.tables import run_table

    raise typer.Exit(run_table(results, document, check))
