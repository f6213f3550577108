"""Runs the target: loads the model, plans memory, warms up, serves, drains on SIGTERM and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from outrider.services.target.api.hang_watch import follow_progress
from outrider.services.target.api.servicer import SERVICE_NAME, Serving, TargetServicer, register_target
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.reachability import Reachability
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.engine.status_line import log_status
from outrider.services.target.grammar.compiler import GrammarCompiler
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.synthetic_acceptance import SyntheticAcceptance
from outrider.services.target.model.token_states import sparse_layers
from outrider.services.target.parallel.group import Order, RankGroup, end_soon, run_rank, start_group
from outrider.services.target.parallel.watchdog import forget_graphs, watched, watched_engine
from outrider.services.target.scheduling.limits import EngineLimits, SchedulerLimits, longest_text
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.cache_planner import CachePlanner
from outrider.services.target.startup.graph_plan import (
    GraphPlan,
    await_draft,
    compile_kernels,
    plan_graphs,
    record_graphs,
)
from outrider.services.target.startup.numerics import (
    idle_preparation,
    load_target_model,
    prepare_attention,
    prepare_decoder,
)
from outrider.services.target.startup.parity_check import check_parity
from outrider.services.target.startup.stage_times import StageTimes
from outrider.services.target.startup.warmup import prompt_rehearsals, run_through
from outrider.shared.attn.create import waits_for_device
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.lifecycle import watch_stop_signals
from outrider.shared.engine.current_device import use_device
from outrider.shared.engine.device_health import ending_if_lost
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.loop import EngineThread
from outrider.shared.kv.pool import CacheSizing
from outrider.shared.nn.checkpoint.tokenizer_file import tokenizer_fingerprint
from outrider.shared.nn.decoder import Decoder
from outrider.shared.obs.logging import configure_logging, get_logger
from outrider.shared.obs.progress import loading
from outrider.shared.parallel.lead import FailureHandler
from outrider.shared.parallel.lead_decoder import graph_observer
from outrider.shared.rpc.server import aio_server
from outrider.shared.spec.drafter import Drafter, DrafterState

POLL_S = 0.02
RECORD_LIMIT_S = 120.0
"""Longest wait for the graphs of a draft that connected while other graphs were being recorded."""

_log = get_logger("outrider.target")

DrafterFactory = Callable[[Decoder, CacheSizing], Drafter]
"""Makes a drafter for a model.

After loading its weights, the drafter calls the `CacheSizing` to determine the size of its KV cache.
"""
Result = TypeVar("Result")


def run(settings: TargetSettings, make_drafter: DrafterFactory | None = None) -> int:
    """Serve the target until SIGTERM or SIGINT, and return the exit code.

    Args:
        settings: The resolved settings.
        make_drafter: Makes a drafter inside this process. The launcher passes this function. By default, the
            drafter is a client of the draft service at `settings.draft`.

    Raises:
        OutriderError: The settings, the checkpoint or the combination of target and draft cannot be served.
            The message names a fix.
    """
    settings.check()
    ranks = settings.ranks()
    configure_logging(f"target-{ranks.rank}" if ranks else "target", settings.log_level, settings.log_json)
    _log.info("settings", **settings.for_log())
    settings.secure_process()
    if ranks is not None and ranks.rank > 0:
        return run_rank(Order(settings), ranks)
    return asyncio.run(_serve(settings, make_drafter))


async def _serve(settings: TargetSettings, make_drafter: DrafterFactory | None) -> int:
    stop = asyncio.Event()
    restore_signals = watch_stop_signals(stop)
    servicer = TargetServicer.of(settings)
    server = aio_server(settings.listen, [(register_target, servicer)], [SERVICE_NAME])
    await server.start()
    target: Target | None = None
    lost: list[OutriderError] = []
    loop = asyncio.get_running_loop()

    def rank_lost(error: OutriderError) -> None:
        lost.append(error)
        end_soon(error)
        loop.call_soon_threadsafe(stop.set)

    try:
        # 1. Load the model, warm up and record graphs.
        target = await _until(
            stop,
            asyncio.to_thread(Target, settings, make_drafter, on_rank_lost=rank_lost, stopped=stop.is_set),
        )
        # 2. Wait for the draft, then run short requests through both.
        if target is not None:
            await _until(stop, target.wait_for_draft(settings.draft_wait_s))
        if target is not None and not stop.is_set():
            await _until(stop, asyncio.to_thread(run_through, target.engine, target.serving.limits))
        # 3. Serve until a signal arrives or a rank is lost.
        if target is not None and not stop.is_set():
            servicer.serve(target.serving)
            await server.set_serving(True)
            _log.info(
                "ready",
                listen=server.address,
                model=target.serving.model_id,
                draft=target.drafter.state().value,
            )
            watch = follow_progress(target.clock, server.set_serving, settings.step_deadline_s, rank_lost)
            following = asyncio.gather(watch, log_status(target.engine.stats, settings.log_interval_s))
            await stop.wait()
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following  # otherwise asyncio logs the cancellation as an error
            if not lost:
                await _drain(settings, server.set_serving, target)
        if lost:
            raise lost[0]
        return 0
    finally:
        await server.stop(0.5)
        if target is not None:
            await asyncio.to_thread(target.shutdown)
        await servicer.close()
        restore_signals()


async def _until(stop: asyncio.Event, work: Awaitable[Result]) -> Result | None:
    """Await `work` until it is done or the stop signal arrives.

    A stop signal does not end work that runs on another thread.
    """
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


async def _drain(
    settings: TargetSettings, set_serving: Callable[[bool], Awaitable[None]], target: Target
) -> None:
    """Drain: report "not serving", wait for the notice period, refuse new requests, and let others finish."""
    await set_serving(False)
    await asyncio.sleep(settings.drain_notice_s)
    target.engine.draining = True
    deadline = time.monotonic() + settings.drain_grace_s
    while target.engine.num_live and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    _log.info("drained", unfinished=target.engine.num_live)


@dataclass(frozen=True, slots=True)
class StandIn:
    """A model without a checkpoint (`shared.nn.dummy`), used by `outrider bench`.

    Attributes:
        decoder: The model with random weights.
        synthetic: Draws the number of accepted draft tokens from a distribution. If None, the model verifies
            the draft tokens.
    """

    decoder: Decoder
    synthetic: SyntheticAcceptance | None = None


class Target:
    """One serving process without its gRPC server: model, KV pool, drafter, engine and engine thread.

    Args:
        settings: The resolved settings.
        make_drafter: Makes a drafter inside this process; see `run`.
        stand_in: Replaces the model of `settings.model`. Only `outrider bench` passes one.
        on_rank_lost: Called when another rank is lost; see `start_group`.
        stopped: Function that returns True once the process must end. The warm-up then ends early, and the
            target cannot serve.
    """

    def __init__(
        self,
        settings: TargetSettings,
        make_drafter: DrafterFactory | None = None,
        stand_in: StandIn | None = None,
        on_rank_lost: FailureHandler = end_soon,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        device = settings.torch_device()
        if device.type == "cpu":
            torch.set_num_threads(settings.cpu_threads())
        use_device(device)
        self._stages = stages = StageTimes()
        self._ranks: RankGroup | None = None
        self._waited_s = 0.0
        self._stopped = stopped
        self._absence = Reachability(None if make_drafter else settings.draft_address())
        # 1. Load the model and choose its attention.
        decoder = prepare_decoder(
            settings, stand_in.decoder if stand_in is not None else self._load(settings, on_rank_lost)
        )
        # FlashInfer allocates a workspace, so create the attention backend before dividing the memory.
        attention = prepare_attention(settings, decoder)
        stages.done("model")
        # 2. Load the draft and divide the remaining memory between both KV caches.
        planner = CachePlanner(
            settings, decoder, drafts=make_drafter is not None or settings.draft_address() is not None
        )
        self.drafter = (
            make_drafter(decoder, planner.draft_tokens) if make_drafter else _make_drafter(settings, decoder)
        )
        stages.done("draft")
        memory, settings = planner.plan(), planner.settings
        _log.info("memory", running_requests=settings.running_requests, **memory.numbers())
        # 3. Make the engine and warm it up.
        graph_plan = plan_graphs(
            settings, cuda=device.type == "cuda", waits=waits_for_device(attention), offers=stand_in is None
        )
        runner = ModelRunner(
            decoder,
            decoder.make_pool(memory.pages, settings.page_size),
            attention,
            synthetic=stand_in.synthetic if stand_in is not None else None,
            graphs=GraphCache(device, graph_plan.graphs, graph_observer(decoder)),
            prefill_sizes=graph_plan.prefills,
        )
        self._graphs = runner.graphs
        self.engine = _make_engine(settings, runner, self.drafter, graph_plan)
        self.engine.recorder.prepare(idle_preparation(settings, decoder, attention))
        with watched(decoder):
            self._warm_up(settings, runner, graph_plan)
        # 4. Start the engine's thread.
        self._thread = EngineThread(
            watched_engine(self.engine, decoder),
            on_start=lambda: use_device(device),
            on_error=ending_if_lost(device, on_rank_lost),
        )
        self.engine.wake, self.clock = self._thread.wake, self._thread.clock
        self._thread.start()
        self.serving = Serving(
            engine=self.engine,
            decoder=decoder,
            limits=settings.limits(),
            settings=settings,
            describe_draft=self.drafter.describe,
            grammars=GrammarCompiler.of(settings.model, decoder.config, settings.grammar_backend),
        )
        stages.log()
        sizes = {"pages": memory.pages, "page_size": settings.page_size}
        _log.info("engine started", **sizes, device=str(device), dtype=str(decoder.dtype))

    def _load(self, settings: TargetSettings, on_rank_lost: FailureHandler) -> Decoder:
        """Load the model. With tensor parallelism, load it on all ranks."""
        with loading(settings.model, _log, to_console=not settings.log_json) as progress:
            if settings.tp == 1:
                return load_target_model(settings, progress)
            self._ranks = start_group(settings, on_rank_lost, progress)
        return self._ranks.decoder

    def _warm_up(self, settings: TargetSettings, runner: ModelRunner, plan: GraphPlan) -> None:
        """Compile kernels, run the parity check, wait for the draft and record CUDA graphs."""
        graphs, to_console = runner.graphs, not settings.log_json
        prompts = prompt_rehearsals(runner)
        compile_kernels(self.engine, graphs, plan, prompts, to_console=to_console)
        self._stages.done("kernels")
        if self._stopped():
            return
        check_parity(runner, self.engine.step_runner)
        self._stages.done("parity")
        # The graphs capture the draft's features, so the draft must be known before they are recorded.
        if graphs.enabled and self.drafter.state() is DrafterState.CONNECTING:
            self._waited_s = await_draft(self.drafter, settings.draft_wait_s, self._is_hopeless)
            self._stages.done("waiting_for_draft")
            if self._stopped():
                return
            compile_kernels(self.engine, graphs, plan, to_console=to_console)
            self._stages.done("kernels")
        record_graphs(self.engine, graphs, plan, prompts, to_console=to_console, stopped=self._stopped)
        self._stages.done("graphs")

    @property
    def recorded_graphs(self) -> int:
        """Number of recorded CUDA graphs."""
        return len(self._graphs.keys)

    async def wait_for_draft(self, timeout_s: float) -> None:
        """Wait until the draft is ready, or give up and serve without a draft.

        Time that the recording of CUDA graphs has already spent on this wait counts towards `timeout_s`.

        Raises:
            OutriderError: The draft does not fit this target.
        """
        deadline = time.monotonic() + timeout_s - self._waited_s
        while (
            self.drafter.state() in (DrafterState.CONNECTING, DrafterState.DOWN)
            and time.monotonic() < deadline
        ):
            misfit = self.drafter.refusal()
            if misfit is not None:
                raise misfit
            if self._absence.is_long():
                break
            await asyncio.sleep(POLL_S)
        if self.drafter.state() not in (DrafterState.ON, DrafterState.NONE):
            _log.warning(
                "serving without the draft until it answers",
                waited_s=round(timeout_s - deadline + time.monotonic(), 1),
            )
            return
        await self.wait_recorded()

    async def wait_recorded(self, *, for_all: bool = False) -> None:
        """Wait, for at most `RECORD_LIMIT_S`, until the first CUDA graphs or all of them are recorded."""
        recorded = self.engine.ask_recorded(for_all=for_all)
        deadline = time.monotonic() + RECORD_LIMIT_S
        # Poll on this thread. If another thread waited, a stop would have to wait for that thread.
        while not recorded.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def shutdown(self) -> None:
        """Stop the engine thread, close the drafter's connection, and then end the other ranks."""
        try:
            self._thread.stop()
            self.serving.grammars.close()
            self.drafter.shutdown()
            forget_graphs(self._graphs, self.serving.decoder)
        finally:
            if self._ranks is not None:
                self._ranks.close()

    def _is_hopeless(self) -> bool:
        return self._stopped() or self.drafter.refusal() is not None or self._absence.is_long()


def _make_engine(
    settings: TargetSettings, runner: ModelRunner, drafter: Drafter, plan: GraphPlan
) -> TargetEngine:
    config, pool = runner.decoder.config, runner.pool
    queue = settings.max_queued_requests, settings.max_queued_prompt_tokens
    most = SchedulerLimits(
        settings.running_requests, *queue, settings.prefill_tokens(), not settings.disable_prefix_cache
    )
    limits = EngineLimits(
        config.vocab_size,
        longest_text(config, settings.max_model_len),
        frozenset(config.eos_token_ids),
        routes=bool(sparse_layers(runner.decoder)),
    )
    return TargetEngine(
        runner, Scheduler(pool.allocator, settings.page_size, most), drafter, limits, plan=plan.loop
    )


def _make_drafter(settings: TargetSettings, decoder: Decoder) -> Drafter:
    address = settings.draft_address()
    if address is None:
        return NoDrafter(decoder.device)
    tokenizer = tokenizer_fingerprint(settings.model)
    identity = TargetIdentity.of(decoder, tokenizer, settings.speculative_algorithm)
    on_device = settings.keeps_draft_rounds(decoder.device)
    deadline_s = settings.draft_fault_deadline_s
    return RemoteDrafter(
        address, identity, decoder.weight, decoder.device, fault_deadline_s=deadline_s, on_device=on_device
    )
