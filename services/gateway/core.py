"""The state that REST and gRPC share: settings, text codec, target client, admission and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TypeVar

from outrider.services.gateway.admission import Admission
from outrider.services.gateway.generation import Generator
from outrider.services.gateway.logprobs import token_bytes
from outrider.services.gateway.metrics import GatewayMetrics
from outrider.services.gateway.parameters import Parameters, RequestBuilder, Surface
from outrider.services.gateway.parsers.registry import ParserNames
from outrider.services.gateway.recent_errors import RecentErrors
from outrider.services.gateway.request import ChoiceEvent
from outrider.services.gateway.request_note import RequestNote, current_note
from outrider.services.gateway.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from outrider.services.gateway.served_target import TargetStats
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.gateway.target_client.client import TargetClient
from outrider.services.gateway.target_client.stream import ReaderLimits
from outrider.services.gateway.tokenizer import TextCodec
from outrider.shared.base.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.shared.obs.logging import get_logger
from outrider.shared.obs.metrics import join_expositions

DRAIN_RETRY_S = 5.0

_log = get_logger("outrider.gateway")

Result = TypeVar("Result")
Prompts = Callable[[], Awaitable[Sequence[tuple[int, ...]]]]


@dataclass(frozen=True, slots=True)
class Job:
    """A request from either API, after all checks that need no tokens.

    Attributes:
        prompts: Returns the token ids of every prompt. Called after admission.
        sequences: Number of sequences, which is the number of prompts times `n`.
        parameters: Sampling, stopping and speculation parameters.
        surface: Field names and defaults of the API that received the request.
        timeout_s: Seconds until the caller's deadline, or None. The server's own limit always applies.
        rids: Names that the client gave to the sequences, for `GatewayCore.abort`. Empty without names.
        per_prompt: Parameters of each prompt. Empty if all prompts have the same `parameters`.
    """

    prompts: Prompts
    sequences: int
    parameters: Parameters
    surface: Surface
    timeout_s: float | None = None
    rids: tuple[str, ...] = ()
    per_prompt: tuple[Parameters, ...] = ()


class GatewayCore:
    """The core that REST and gRPC share. A gateway process has one core.

    Attributes:
        token_bytes: Returns the bytes of a token's text, for logprobs.
        parsers: The parsers of the model's answers.
        draining: True once shutdown has begun. The gateway then reports not ready.
        admitting: Whether new requests are accepted.
        idle: Event that is set while no request is running.
        errors: The latest error replies.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.codec = TextCodec.load(settings.tokenizer) if settings.tokenizer else None
        self.token_bytes = token_bytes(self.codec.tokenizer if self.codec else None)
        self.metrics = GatewayMetrics()
        self.errors = RecentErrors()
        self.admission = Admission(
            settings.max_queued_requests, settings.max_queued_prompt_tokens, time.monotonic
        )
        self.client = TargetClient(
            settings.target,
            ReaderLimits(settings.slow_reader_bytes, settings.slow_reader_timeout_s),
            settings.target_probe_timeout_s,
        )
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
        self.started_at = int(time.time())
        self.draining = False
        self.admitting = True
        self.idle = asyncio.Event()
        self.idle.set()
        self._running = 0
        # Client's name of a sequence or a batch → ids of the running sequences.
        self._by_rid: dict[str, set[str]] = {}
        self._generator = Generator(self.client, self.codec.tokenizer if self.codec else None, self.metrics)

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be accepted."""
        return self.client.ready and not self.draining

    def check_ready(self) -> None:
        """Raise UnavailableError, with the reason, unless the gateway is ready."""
        if self.draining:
            raise self._draining()
        if not self.client.ready:
            message = f"The target service at {self.settings.target} is not ready."
            raise UnavailableError(message, reason="target_unavailable", retry_after_s=1.0)

    def need_codec(self, field: str) -> TextCodec:
        """Return the text codec.

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
        """Admit a request, tokenize its prompts and run its sequences.

        Closing the generator cancels the sequences.

        Raises:
            OutriderError: With status 429 if the server is overloaded, 400 if the tokens break a limit, or
                503 if the server drains or has no target. Errors reported by the target are raised as well.
                The error for too many sequences is raised before any work is done.
        """
        if not self.admitting:
            raise self._draining()
        note = current_note.get() or RequestNote()
        with self.admission.admit(job.sequences) as slot:
            names: list[tuple[str, str]] = []
            self._running += 1
            self.idle.clear()
            try:
                info = self.client.info
                deadline = asyncio.get_running_loop().time() + self._timeout_s(job)
                prompts = await named(job.prompts(), job.surface.prompt)
                requests = [
                    request
                    for parameters, part in _parts(job, prompts)
                    for request in self.builder.build(part, parameters, job.surface, info, deadline)
                ]
                ids = [request.request_id for request in requests]
                names = list(zip(job.rids or ids, ids, strict=True))
                for rid, request_id in names:
                    self._by_rid.setdefault(rid, set()).add(request_id)
                slot.add_prompts([len(request.prompt_ids) for request in requests])
                async with aclosing(self._generator.run(requests, slot)) as events:
                    async for event in events:
                        note.observe(event)
                        yield event
            except OutriderError as error:
                note.error = error
                raise
            finally:
                self._forget(names)
                self._running -= 1
                if not self._running:
                    self.idle.set()

    def abort(self, rid: str | None) -> int:
        """Abort running sequences. Their clients get what has been generated.

        Args:
            rid: The client's name of a sequence, or of a batch with numbered sequences. None aborts all.

        Returns:
            The number of sequences.
        """
        found = {
            request_id
            for name, ids in self._by_rid.items()
            if rid is None or name == rid or name.rpartition("-")[0] == rid
            for request_id in ids
        }
        for request_id in found:
            self.client.cancel(request_id)
        return len(found)

    def _forget(self, names: Sequence[tuple[str, str]]) -> None:
        for rid, request_id in names:
            ids = self._by_rid.get(rid, set())
            ids.discard(request_id)
            if not ids:
                self._by_rid.pop(rid, None)

    def _timeout_s(self, job: Job) -> float:
        limit = self.settings.request_timeout_s
        return limit if job.timeout_s is None else min(job.timeout_s, limit)

    async def render_metrics(self) -> str:
        """Return the gateway's metrics. If the target answers, append the target's metrics."""
        try:
            return self.join_metrics(await self.client.stats())
        except OutriderError:
            return self.join_metrics(None)

    def join_metrics(self, stats: TargetStats | None) -> str:
        """Return the gateway's metrics, followed by the target's metrics unless `stats` is None."""
        metrics = self.metrics
        metrics.active.set(self.admission.active)
        metrics.waiting.set(self.admission.waiting)
        metrics.waiting_tokens.set(self.admission.waiting_tokens)
        metrics.target_ready.set(self.client.ready)
        return join_expositions(metrics.render(), stats.prometheus_text) if stats else metrics.render()

    @staticmethod
    def _draining() -> UnavailableError:
        return UnavailableError(
            "The server is shutting down. Send the request to another server, or retry later.",
            reason="draining",
            retry_after_s=DRAIN_RETRY_S,
        )


def _sampling_defaults(settings: GatewaySettings) -> SamplingDefaults:
    """Return the defaults of the model whose tokenizer is served, unless a setting turns them off."""
    if settings.tokenizer is None or settings.sampling_defaults != "model":
        return NO_DEFAULTS
    defaults = SamplingDefaults.load(settings.tokenizer)
    if defaults != NO_DEFAULTS:
        found = {name: value for name, value in asdict(defaults).items() if value is not None}
        _log.info("sampling defaults of the model; turn them off by --sampling-defaults openai", **found)
    return defaults


def rids_of(rid: str | None, sequences: int) -> tuple[str, ...]:
    """Return the names of the sequences of a request: its name, numbered if there are several."""
    if rid is None:
        return ()
    return (rid,) if sequences == 1 else tuple(f"{rid}-{index}" for index in range(sequences))


async def named(prompts: Awaitable[Result], field: str) -> Result:
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


def _parts(
    job: Job, prompts: Sequence[tuple[int, ...]]
) -> list[tuple[Parameters, Sequence[tuple[int, ...]]]]:
    """Return the prompts with their parameters: all together, or each on its own."""
    if not job.per_prompt:
        return [(job.parameters, prompts)]
    return [(one, [prompt]) for one, prompt in zip(job.per_prompt, prompts, strict=True)]
