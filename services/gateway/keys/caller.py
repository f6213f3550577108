"""The caller of a request: the limits and the recent use of the caller's API key, and checks of requests.

Use callers on the event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from outrider.services.gateway.keys.entry import KeyEntry
from outrider.services.gateway.keys.key_metrics import KeyMetrics
from outrider.services.gateway.keys.rate_limits import MINUTE_S, MinuteBucket
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError, OverloadedError
from outrider.shared.base.generation import SpeculationMode

RATE_LIMITED = "rate_limit_exceeded"
CONCURRENCY_RETRY_S = 1.0
MAX_RETRY_S = MINUTE_S

current_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller of the request that this task serves. None if the gateway runs without keys."""


def allowed_model(model: str) -> str:
    """Return `model`. Raise OutriderError (PERMISSION_DENIED) if the caller's API key may not use it."""
    if (caller := current_caller.get()) is not None:
        caller.check_model(model)
    return model


class Caller:
    """An API key in use: its limits, and the amounts that it has used recently.

    A `Caller` object stays the same when the keys file is read again. A reload of the file therefore does not
    reset the used amounts.

    Attributes:
        entry: The key's current limits and permissions.
        active: Number of sequences of this key that wait or run.
    """

    def __init__(self, entry: KeyEntry, clock: Callable[[], float], metrics: KeyMetrics) -> None:
        self.entry = entry
        self.active = 0
        self._clock = clock
        self._metrics = metrics
        self._requests: MinuteBucket | None = None
        self._tokens: MinuteBucket | None = None
        self.update(entry)

    @property
    def name(self) -> str:
        """Name of the key."""
        return self.entry.name

    def update(self, entry: KeyEntry) -> None:
        """Replace the entry. Requests that run are not affected."""
        self.entry = entry
        self._requests = self._resized(self._requests, entry.requests_per_minute)
        self._tokens = self._resized(self._tokens, entry.tokens_per_minute)

    def _resized(self, bucket: MinuteBucket | None, limit: int | None) -> MinuteBucket | None:
        if limit is None:
            return None
        if bucket is None:
            return MinuteBucket(limit, self._clock)
        bucket.resize(limit)
        return bucket

    def count_request(self) -> None:
        """Count one request.

        Raises:
            OverloadedError: If the key has used up its requests per minute.
        """
        if self._requests is not None and (wait_s := self._requests.wait_s(1)):
            raise self._limited(
                f"Limit: {self._requests.limit} requests per minute.", wait_s, "requests_per_minute"
            )
        if self._requests is not None:
            self._requests.take(1)
        self._metrics.requests.labels(self.name).inc()

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Return a context that reserves room for the sequences of a request within the API key's limits.

        Enter the context before any other work on the request.

        Raises:
            InvalidRequestError: If the request alone exceeds the key's limit of concurrent sequences.
            OverloadedError: If too many of the key's sequences are active, or the key has no tokens left.
        """
        most = self.entry.max_concurrent
        if most is not None and sequences > most:
            raise InvalidRequestError(
                f"The request has {sequences} sequences (prompts times n). The API key {self.name!r} may run "
                f"{most} at once.",
                field="n",
            )
        if most is not None and self.active + sequences > most:
            raise self._limited(
                f"Limit: {most} sequences at once, {self.active} are active.",
                CONCURRENCY_RETRY_S,
                "max_concurrent",
            )
        self.check_tokens(1)
        self._add(sequences)
        try:
            yield
        finally:
            self._add(-sequences)

    def check_tokens(self, amount: int) -> None:
        """Check that the key may use this many tokens now.

        Raises:
            OverloadedError: If the key has used up its tokens per minute.
        """
        if self._tokens is not None and (wait_s := self._tokens.wait_s(amount)):
            raise self._limited(
                f"Limit: {self._tokens.limit} tokens per minute.", wait_s, "tokens_per_minute"
            )

    def charge_prompt(self, tokens: int) -> None:
        """Charge the API key for the prompt tokens of a request.

        Each prompt counts once, even if the request asks for several answers to it.

        Raises:
            OverloadedError: If the key has too few tokens left. No tokens are charged in this case.
        """
        self.check_tokens(tokens)
        self._charge(tokens, "prompt")

    def charge_output(self, tokens: int) -> None:
        """Charge generated tokens. The key may fall into debt, which delays its next requests."""
        self._charge(tokens, "generation")

    def _charge(self, tokens: int, kind: str) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens)
        self._metrics.tokens.labels(self.name, kind).inc(tokens)

    def priority(self, asked: int) -> int:
        """Return the priority of a request. For priority 0, return the key's allowed priority nearest to 0.

        Raises:
            OutriderError: PERMISSION_DENIED, if the API key may not set this priority.
        """
        lowest, highest = self.entry.priority
        if asked and not lowest <= asked <= highest:
            allowed = f"from {lowest} to {highest}" if lowest < highest else f"{lowest}"
            raise self._denied(f"may set the priority {allowed}, not {asked}", "priority")
        return min(max(asked, lowest), highest)

    def mode(
        self, asked: SpeculationMode | None, default: SpeculationMode = SpeculationMode.AUTO
    ) -> SpeculationMode:
        """Return the speculation mode of a request.

        In mode AUTO, the server decides. For an API key that may not use AUTO, the key's first allowed mode
        is used instead of AUTO. The same applies to a default mode that the key may not use.

        Args:
            asked: The mode that the request names, or None.
            default: The server's mode for requests that name none.

        Raises:
            OutriderError: PERMISSION_DENIED, if the key may not use the requested mode.
        """
        modes = self.entry.modes
        if (wanted := asked or default) in modes:
            return wanted
        if asked in (None, SpeculationMode.AUTO):
            return modes[0]
        allowed = ", ".join(mode.value for mode in modes)
        raise self._denied(f"may use the modes {allowed}, not {wanted.value}", "speculation.mode")

    def check_model(self, model: str) -> None:
        """Raise OutriderError (PERMISSION_DENIED) if the key may not use this model."""
        if self.entry.models is not None and model not in self.entry.models:
            raise self._denied("may not use this model", "model")

    def salt(self, asked: str) -> str:
        """Return the salt for the prefix cache.

        No client can choose a salt that equals another key's salt.
        """
        if self.entry.cache_salt:
            return f"key:{self.entry.cache_salt}:{asked}"
        return f"request:{asked}" if asked else ""

    def check_admin(self, path: str) -> None:
        """Raise OutriderError (PERMISSION_DENIED) unless the key may call admin routes."""
        if not self.entry.admin:
            raise self._denied(f"may not call {path}, which is for operators", None)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's rate-limit headers, which every reply to this key contains."""
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.wait_s(bucket.limit):.3f}s"
        return headers

    def _add(self, sequences: int) -> None:
        self.active += sequences
        self._metrics.active.labels(self.name).set(self.active)

    def _limited(self, limit: str, wait_s: float, reason: str) -> OverloadedError:
        self._metrics.refusals.labels(self.name, reason).inc()
        return OverloadedError(
            f"Rate limit reached for the API key {self.name!r}. {limit} Retry later.",
            reason=RATE_LIMITED,
            retry_after_s=min(MAX_RETRY_S, max(wait_s, 0.001)),
        )

    def _denied(self, what: str, field: str | None) -> OutriderError:
        self._metrics.refusals.labels(self.name, "permission_denied").inc()
        return OutriderError(
            f"The API key {self.name!r} {what}.",
            code=ErrorCode.PERMISSION_DENIED,
            reason="permission_denied",
            field=field,
        )
