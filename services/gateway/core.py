"""The state that REST and gRPC share: settings, text codec, target client, admission and metrics."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from outrider.services.gateway.admission import Admission
from outrider.services.gateway.generation import Generator
from outrider.services.gateway.keys.caller import Caller, current_caller
from outrider.services.gateway.keys.key_ring import KeyRing
from outrider.services.gateway.lifecycle import Lifecycle
from outrider.services.gateway.logprobs import token_bytes_of
from outrider.services.gateway.metrics import GatewayMetrics
from outrider.services.gateway.parameters import Parameters, RequestBuilder, Surface
from outrider.services.gateway.parsers.registry import ParserNames
from outrider.services.gateway.recent_errors import RecentErrors
from outrider.services.gateway.request import ChoiceEvent, Chunk
from outrider.services.gateway.request_note import RequestNote, current_note
from outrider.services.gateway.requested_states import check_states
from outrider.services.gateway.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from outrider.services.gateway.served_target import unknown_model
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.gateway.target_client.member import Member
from outrider.services.gateway.target_client.pool import ModelTargets, PoolLimits, TargetPool
from outrider.services.gateway.target_client.stream import ReaderLimits
from outrider.services.gateway.tokenizer import TextCodec
from outrider.shared.base.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.shared.obs.logging import get_logger
from outrider.shared.obs.metrics import join_expositions
from outrider.shared.obs.open_tracer import open_tracer

DRAIN_RETRY_S = 5.0
_log = get_logger("outrider.gateway")

Result = TypeVar("Result")
ReadPrompts = Callable[[], Awaitable[Sequence[tuple[int, ...]]]]


@dataclass(frozen=True, slots=True)
class Job:
    """A request from REST or gRPC, after all checks that are possible before tokenization.

    Attributes:
        prompts: Function that returns the token ids of every prompt. The core calls it after admission.
        sequences: Number of sequences, which is the number of prompts times `n`.
        parameters: Parameters for sampling, stopping and speculation.
        surface: Field names and defaults of the API that received the request.
        timeout_s: Seconds until the client's deadline, or None. The server's own time limit always applies.
        rids: Names that the client gave to the sequences, for `GatewayCore.abort`. Empty if there are none.
        per_prompt: Parameters of each prompt. Empty if all prompts use `parameters`.
        streams: Whether the client reads the answer while it is generated.
    """

    prompts: ReadPrompts
    sequences: int
    parameters: Parameters
    surface: Surface
    timeout_s: float | None = None
    rids: tuple[str, ...] = ()
    per_prompt: tuple[Parameters, ...] = ()
    streams: bool = True


class GatewayCore:
    """The core that REST and gRPC share. A gateway process creates one core, for the default model.

    If the targets serve several models, `of_model` returns a copy of the core for each other model. A copy
    has its own settings, its own text codec and the targets of its own model. It shares everything else.

    Attributes:
        targets: The targets of all models. `client` has the targets of this core's model.
        codecs: The text codecs of all models, by the path of the tokenizer.
        token_bytes: Function that returns the bytes of a token's text, for logprobs.
        parsers: Names of the output parsers for this core's model.
        lifecycle: Records whether the gateway accepts requests.
        errors: The latest error replies.
        ring: The API keys.
        tracer: Records the spans of requests.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.metrics = GatewayMetrics()
        self.tracer = open_tracer("gateway", settings.otlp_endpoint, settings.trace_share)
        self.errors = RecentErrors(self.metrics.failed)
        self.ring = KeyRing(settings.fixed_keys(), settings.api_keys_file, time.monotonic, self.metrics.keys)
        self.admission = Admission(
            settings.max_queued_requests,
            settings.max_queued_prompt_tokens,
            time.monotonic,
            settings.max_queue_wait_s,
            lambda: self.targets.slots,
        )
        self.targets = _target_pool(settings, self.metrics)
        self.lifecycle = Lifecycle()
        self.started_at = int(time.time())
        # Client's name of a sequence or of a batch → ids of the running sequences.
        self._by_rid: dict[str, set[str]] = {}
        # Id of a running sequence → name of the API key that started it.
        self._owners: dict[str, str] = {}
        self.codecs = _load_codecs(settings)
        # The cores of other models, by model id.
        self._others: dict[str, GatewayCore] = {}
        self._serve_model(settings, None)

    def _serve_model(self, settings: GatewaySettings, model_id: str | None) -> None:
        """Set the attributes that depend on the model. `model_id` is None for the default model."""
        self.settings = settings
        self.codec = replace(self.codecs[settings.tokenizer]) if settings.tokenizer else None
        self.token_bytes = token_bytes_of(self.codec.tokenizer if self.codec else None)
        self.client = ModelTargets(self.targets, model_id)
        if self.codec:
            self.codec.limit.context = lambda: self.client.info.max_model_len
        self.builder = RequestBuilder(
            settings, self.codec.encode_plain if self.codec else None, _sampling_defaults(settings)
        )
        self.parsers = ParserNames.choose(
            settings.tool_call_parser,
            settings.reasoning_parser,
            self.codec.template_source if self.codec else "",
        )
        self._generator = Generator(self.client, self.codec.tokenizer if self.codec else None, self.metrics)

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be accepted."""
        return self.targets.ready and not self.lifecycle.draining

    def check_ready(self) -> None:
        """Raise UnavailableError, with the reason, unless the gateway is ready."""
        if self.lifecycle.draining:
            raise self._draining()
        if not self.targets.ready:
            raise self.targets.unavailable()

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model names that requests may use. The first name is the name of the default model.

        Raises:
            UnavailableError: If no target has ever been connected.
        """
        default = self.settings.served_model_name or (self.client.info.model_id,)
        return (*default, *(one for one in self.targets.model_ids[1:] if one not in default))

    def of_model(self, name: str | None) -> GatewayCore:
        """Return the core of the model that a request names. With None, return the core of the default model.

        Raises:
            ModelNotFoundError: If several models are served, and none has this name.
        """
        model_ids = self.targets.model_ids
        if len(model_ids) < 2 and not self.settings.model_tokenizer:
            return self
        default = self.client.info.model_id
        own_names = self.settings.served_model_name or (default,)
        model_id = default if not name or name in own_names else name
        if model_id not in model_ids:
            if not self.settings.any_model:
                raise unknown_model(model_id, self.model_names)
            model_id = default
        if model_id == default and model_id not in self.settings.tokenizers:
            return self
        if model_id not in self._others:
            names = own_names if model_id == default else (model_id,)
            changes: dict[str, object] = {"served_model_name": names}
            if model_id in self.settings.tokenizers:
                changes["tokenizer"] = self.settings.tokenizers[model_id]
            core = self._others[model_id] = copy.copy(self)
            core._serve_model(self.settings.model_copy(update=changes), model_id)
        return self._others[model_id]

    def need_codec(self, field: str) -> TextCodec:
        """Return the codec that converts between text and token ids.

        Args:
            field: Field of the request that needs the codec. The error names this field.

        Raises:
            InvalidRequestError: If this server runs without a tokenizer.
        """
        if self.codec is None:
            message = (
                f"{field} requires a tokenizer, and this server runs without one. "
                "Send token ids, or start the gateway with --tokenizer DIR."
            )
            raise InvalidRequestError(message, field=field, reason="no_tokenizer")
        return self.codec

    async def generate(self, job: Job) -> AsyncGenerator[ChoiceEvent, None]:
        """Admit a request, tokenize its prompts, run its sequences and yield their events.

        Closing the generator cancels the sequences.

        Raises:
            OutriderError: With status 429 if the server is overloaded, 400 if the tokens exceed a limit, and
                503 if the server drains or has no target. Errors that the target reports are raised too.
        """
        if not self.lifecycle.admitting:
            raise self._draining()
        note = current_note.get() or RequestNote()
        note.model = self.client.name
        caller = current_caller.get()
        if caller is not None:
            note.key = caller.name
            job = _allowed(job, caller, self.settings)
        with (
            caller.admit(job.sequences) if caller is not None else nullcontext(),
            self.admission.admit(
                job.sequences,
                caller.name if caller is not None else "",
                deadline_s=self._timeout_s(job),
                priority=job.parameters.priority,
                model=self.client.model_id,
            ) as slot,
        ):
            names: list[tuple[str, str]] = []
            self.lifecycle.began()
            try:
                info = self.client.info
                deadline = asyncio.get_running_loop().time() + self._timeout_s(job)
                prompts = await naming_field(job.prompts(), job.surface.prompt)
                if caller is not None:
                    caller.charge_prompt(sum(len(prompt) for prompt in prompts))
                tenant, parent = note.key or "", note.span.traceparent
                requests = [
                    replace(one, tenant=tenant, traceparent=parent, streams=job.streams or one.stop.searches)
                    for parameters, part in _parts(job, prompts)
                    for one in self.builder.build(part, parameters, job.surface, info, deadline)
                ]
                check_states(requests, info, self.settings.max_state_bytes, job.surface.prefix)
                ids = [one.request_id for one in requests]
                names = list(zip(job.rids or ids, ids, strict=True))
                for rid, request_id in names:
                    self._by_rid.setdefault(rid, set()).add(request_id)
                    if caller is not None:
                        self._owners[request_id] = caller.name
                slot.add_prompts([len(request.prompt_ids) for request in requests])
                async with aclosing(self._generator.run(requests, slot)) as events:
                    async for event in events:
                        note.observe(event)
                        if caller is not None and isinstance(event.event, Chunk):
                            caller.charge_output(len(event.event.token_ids))
                        yield event
            except OutriderError as error:
                note.error = error
                raise
            finally:
                self._forget(names)
                self.lifecycle.ended()

    def abort(self, rid: str | None) -> int:
        """Abort running sequences. Their clients receive the text that has been generated so far.

        A caller without an admin key can abort only the sequences of its own key.

        Args:
            rid: The name that the client gave to a sequence or to a whole batch. With None, abort all
                sequences.

        Returns:
            The number of aborted sequences.
        """
        caller = current_caller.get()
        found = {
            request_id
            for name, ids in self._by_rid.items()
            if rid is None or name == rid or name.rpartition("-")[0] == rid
            for request_id in ids
            if caller is None or caller.entry.admin or self._owners.get(request_id) == caller.name
        }
        for request_id in found:
            self.targets.cancel(request_id)
        return len(found)

    def _forget(self, names: Sequence[tuple[str, str]]) -> None:
        for rid, request_id in names:
            ids = self._by_rid.get(rid, set())
            ids.discard(request_id)
            self._owners.pop(request_id, None)
            if not ids:
                self._by_rid.pop(rid, None)

    def _timeout_s(self, job: Job) -> float:
        limit = self.settings.request_timeout_s
        return limit if job.timeout_s is None else min(job.timeout_s, limit)

    async def render_metrics(self) -> str:
        """Return the gateway's metrics, followed by the metrics of all targets that reply."""
        members = self.targets.members
        stats = await self.targets.stats(members)
        found = [(one, text.prometheus_text) for one, text in zip(members, stats, strict=True) if text]
        return self.join_metrics(found)

    def join_metrics(self, texts: Sequence[tuple[Member, str]]) -> str:
        """Return the gateway's Prometheus metrics, followed by the targets' metrics in `texts`.

        Each sample of a target gets the labels `model` and `target`.
        """
        metrics = self.metrics
        metrics.active.set(self.admission.active)
        metrics.waiting.set(self.admission.waiting)
        metrics.waiting_tokens.set(self.admission.waiting_tokens)
        metrics.show_targets(self.targets.members)
        return join_expositions(metrics.render(), [(one.labels, text) for one, text in texts])

    @staticmethod
    def _draining() -> UnavailableError:
        return UnavailableError(
            "The server is shutting down. Send the request to another server, or retry later.",
            reason="draining",
            retry_after_s=DRAIN_RETRY_S,
        )


def _load_codecs(settings: GatewaySettings) -> dict[Path, TextCodec]:
    """Load the tokenizers of all models at start-up, because loading one later would block the event loop."""
    paths = dict.fromkeys([settings.tokenizer, *settings.tokenizers.values()])
    return {path: TextCodec.load(path) for path in paths if path is not None}


def _target_pool(settings: GatewaySettings, metrics: GatewayMetrics) -> TargetPool:
    reader = ReaderLimits(settings.slow_reader_bytes, settings.slow_reader_timeout_s)
    limits = PoolLimits(
        reader, settings.target_probe_timeout_s, settings.target_refresh_s, settings.target_wait_s
    )
    return TargetPool(settings.sources, limits, lambda *labels: metrics.moved.labels(*labels).inc())


def _sampling_defaults(settings: GatewaySettings) -> SamplingDefaults:
    """Return the sampling defaults that the model recommends.

    There are none if `sampling_defaults` turns them off.
    """
    if settings.tokenizer is None or settings.sampling_defaults != "model":
        return NO_DEFAULTS
    defaults = SamplingDefaults.load(settings.tokenizer)
    if defaults != NO_DEFAULTS:
        found = {name: value for name, value in asdict(defaults).items() if value is not None}
        _log.info("using the model's sampling defaults; turn them off: --sampling-defaults openai", **found)
    return defaults


def rids_of(rid: str | None, sequences: int) -> tuple[str, ...]:
    """Return the name of each sequence of a request: `rid`, with a number if there are several sequences."""
    if rid is None:
        return ()
    return (rid,) if sequences == 1 else tuple(f"{rid}-{index}" for index in range(sequences))


async def naming_field(prompts: Awaitable[Result], field: str) -> Result:
    """Await the prompts of a request. An error that names no field gets the name of the prompt's field.

    Raises:
        InvalidRequestError: If a prompt is not valid.
    """
    try:
        return await prompts
    except InvalidRequestError as error:
        if error.field is not None:
            raise
        raise InvalidRequestError(f"{field}: {error.message}", field=field, reason=error.reason) from None


def _allowed(job: Job, caller: Caller, settings: GatewaySettings) -> Job:
    """Return the job with the priority, mode of speculation and cache salt that the caller's API key allows.

    Raises:
        OutriderError: PERMISSION_DENIED, if the key may not set a value that the request sets.
    """

    def limited(p: Parameters) -> Parameters:
        return replace(
            p,
            priority=caller.priority(p.priority),
            speculation=replace(
                p.speculation, mode=caller.mode(p.speculation.mode, settings.speculation_mode)
            ),
            cache_salt=caller.salt(p.cache_salt),
        )

    return replace(
        job, parameters=limited(job.parameters), per_prompt=tuple(limited(one) for one in job.per_prompt)
    )


def _parts(
    job: Job, prompts: Sequence[tuple[int, ...]]
) -> list[tuple[Parameters, Sequence[tuple[int, ...]]]]:
    """Return groups of prompts with their parameters: one group for all prompts, or one for each prompt."""
    if not job.per_prompt:
        return [(job.parameters, prompts)]
    return [(one, [prompt]) for one, prompt in zip(job.per_prompt, prompts, strict=True)]
