"""The targets of a gateway: follows their addresses and their health, and places sequences on them.

Targets with equal fingerprints serve the same model. Targets with different fingerprints serve different
models, each under its own name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.services.gateway.request import GenerationRequest
from outrider.services.gateway.served_target import ServedTarget, TargetStats
from outrider.services.gateway.target_client.client import Readiness, TargetClient
from outrider.services.gateway.target_client.member import Member
from outrider.services.gateway.target_client.movable_stream import MovableStream
from outrider.services.gateway.target_client.picker import Picker
from outrider.services.gateway.target_client.probe import PROBE_TIMEOUT_S
from outrider.services.gateway.target_client.stream import ReaderLimits
from outrider.services.gateway.target_sources import TargetSource
from outrider.shared.base.errors import ConfigurationError, OutriderError, UnavailableError
from outrider.shared.obs.logging import get_logger

REFRESH_S = 5.0
WAIT_S = 15.0
_log = get_logger("outrider.gateway.target")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits and times of a gateway's pool of targets.

    Attributes:
        reader: Limits on the unread events of a sequence.
        probe_timeout_s: Seconds after which the reply to a health check is overdue.
        refresh_s: Interval, in seconds, at which the files and DNS names with the targets' addresses are read
            again.
        wait_s: Seconds that a sequence waits for another target after its target was lost. In a pool that can
            have only one target, the sequence does not wait.
    """

    reader: ReaderLimits
    probe_timeout_s: float = PROBE_TIMEOUT_S
    refresh_s: float = REFRESH_S
    wait_s: float = WAIT_S


@dataclass(frozen=True, slots=True)
class _Group:
    """The targets that serve one model name, and the limits that all of them support."""

    key: tuple[str, str]
    members: tuple[Member, ...]
    info: ServedTarget


class TargetPool:
    """All targets of a gateway. Use the object on one event loop only.

    Args:
        sources: The sources of the targets' addresses.
        limits: Limits and times.
        on_moved: Called with the model's name and the reason after a sequence has moved to another target.

    Attributes:
        readiness: Flag that is set while at least one target is ready.
    """

    def __init__(
        self,
        sources: Sequence[TargetSource],
        limits: PoolLimits,
        on_moved: Callable[[str, str], None] = lambda model, reason: None,
    ) -> None:
        self._sources = sources
        self._limits = limits
        self._on_moved = on_moved
        self._found: dict[TargetSource, tuple[str, ...]] = {}
        self._complaints: dict[TargetSource, str] = {}
        self._members: dict[str, Member] = {}
        self._groups: dict[str | None, _Group | None] = {}
        self._last_info: dict[str | None, ServedTarget] = {}
        self._streams: dict[str, MovableStream] = {}
        self._picker = Picker()
        self._change = asyncio.Event()
        self._refresh_task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.readiness = Readiness()

    async def start(self) -> None:
        """Start connecting in the background."""
        fixed = {one: await one.addresses() for one in self._sources if not one.changes}
        await self._adopt(fixed)
        if len(fixed) < len(self._sources):
            self._refresh_task = asyncio.create_task(self._refresh(), name="target-addresses")

    async def close(self) -> None:
        """Close all connections. Running sequences receive no further events."""
        if self._refresh_task:
            self._refresh_task.cancel()
            await asyncio.gather(self._refresh_task, return_exceptions=True)
        await asyncio.gather(*(one.client.close() for one in self._members.values()), *self._closing)

    @property
    def ready(self) -> bool:
        """Whether at least one target is connected and serving."""
        return bool(self.readiness)

    @property
    def members(self) -> tuple[Member, ...]:
        """The listed targets, in the order of the settings."""
        return tuple(one for one in self._members.values() if one.listed)

    @property
    def slots(self) -> int:
        """Number of sequences that the targets in use can run at the same time."""
        infos = (one.client.known_info for one in self.members if one.client.ready)
        return sum(info.max_running_requests for info in infos if info is not None)

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Names of the models whose targets have ever connected. The default model's name comes first."""
        known = (one.client.known_info for one in self.members)
        return tuple(dict.fromkeys(info.model_id for info in known if info is not None))

    def is_ready(self, model_id: str | None) -> bool:
        """Return whether a target that serves this model is ready. None selects the default model."""
        group = self._group(model_id)
        return group is not None and any(one.client.ready for one in group.members)

    def info(self, model_id: str | None) -> ServedTarget:
        """Return the information that holds for all targets that serve a model.

        The information dates from the last connection or refresh of each target.

        Raises:
            UnavailableError: If no target of the model has ever been connected.
        """
        group = self._group(model_id)
        if group is None:
            # Requests may still run on targets that are no longer listed. Their replies need this
            # information.
            if model_id in self._last_info:
                return self._last_info[model_id]
            raise self.unavailable(model_id)
        return group.info

    def submit(self, request: GenerationRequest, model_id: str | None) -> MovableStream:
        """Start a sequence on the best target of a model.

        Raises:
            UnavailableError: If no target of this model is connected and serving.
        """
        group = self._group(model_id)
        member = None if group is None else self.choose(request, group.key, {})
        if member is None:
            raise self.unavailable(model_id)
        stream = self._streams[request.request_id] = MovableStream(request, self, member)
        return stream

    def cancel(self, request_id: str) -> None:
        """Stop a sequence, whose stream then ends with the reason CANCELLED. An unknown id has no effect."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.cancel()
            self._announce()

    async def refresh(self, members: Sequence[Member]) -> list[tuple[ServedTarget, TargetStats] | None]:
        """Request targets' information and statistics. The entry of a target that does not reply is None."""

        async def ask(member: Member) -> tuple[ServedTarget, TargetStats] | None:
            try:
                stats = await member.client.stats()
                return await member.client.refresh_info(), stats
            except OutriderError:
                return None

        return await asyncio.gather(*(ask(one) for one in members))

    async def stats(self, members: Sequence[Member]) -> list[TargetStats | None]:
        """Request statistics from targets. The entry of a target that does not reply is None."""

        async def ask(member: Member) -> TargetStats | None:
            try:
                return await member.client.stats()
            except OutriderError:
                return None

        return await asyncio.gather(*(ask(one) for one in members))

    # ---- Placement

    def choose(
        self, request: GenerationRequest, model_key: tuple[str, str] | None, left: dict[Member, int]
    ) -> Member | None:
        """Return a ready target for a request, or None. The arguments are those of `TargetChooser.choose`."""
        found = [
            one
            for one in self._members.values()
            if one.listed
            and one.client.ready
            and model_key in (None, one.model_key)
            and left.get(one) != one.client.connections
            and (not request.resume_ids or one.client.info.resumes)
            and (request.constraint is None or one.client.info.constrains)
        ]
        if not found:
            return None
        return self._picker.pick(found, request.prompt_ids, f"{model_key} {request.cache_salt}")

    def patience_s(self) -> float:
        """Return how long a sequence without a target waits for a new target, in seconds."""
        others = len(self._members) > 1 or any(one.changes for one in self._sources)
        return self._limits.wait_s if others else 0.0

    async def changed(self) -> None:
        """Wait until a target changes its state."""
        await self._change.wait()

    def moved(self, model: str, reason: str) -> None:
        """Count a sequence of a model that has moved."""
        self._on_moved(model, reason)
        self._dismiss_idle()

    def forget(self, request_id: str, member: Member | None) -> None:
        """Forget a sequence that has ended. If its target is unlisted and now idle, close the connection."""
        self._streams.pop(request_id, None)
        if member is not None and not member.listed:
            self._dismiss_idle()

    # ---- Members

    async def _refresh(self) -> None:
        while True:
            found = dict(self._found)
            for source in self._sources:
                if source.changes:
                    try:
                        found[source] = await source.addresses()
                        self._complaints.pop(source, None)
                    except ConfigurationError as error:
                        self._complain(source, error.message)
            await self._adopt(found)
            await asyncio.sleep(self._limits.refresh_s)

    def _complain(self, source: TargetSource, message: str) -> None:
        """Log why the addresses of a source cannot be renewed. Log the same reason only once in a row."""
        if self._complaints.get(source) != message:
            self._complaints[source] = message
            _log.warning("target addresses kept", source=source.text, error=message)

    async def _adopt(self, found: dict[TargetSource, tuple[str, ...]]) -> None:
        """Connect to new addresses.

        Stop placing sequences on targets whose addresses are no longer listed.
        """
        if found == self._found:
            return
        self._found = found
        listed = list(dict.fromkeys(one for source in self._sources for one in found.get(source, ())))
        old, self._members = self._members, {}
        for address in listed:
            member = old.pop(address, None)
            if member is None:
                limits = self._limits
                client = TargetClient(
                    address,
                    limits.reader,
                    limits.probe_timeout_s,
                    on_change=self._announce,
                    abandons=partial(self._has_substitute, address),
                )
                member = Member(client)
                await client.start()
            member.listed = True
            self._members[address] = member
        for address, member in old.items():
            member.listed = False
            self._members[address] = member
        self._dismiss_idle()
        self._announce()
        if len(listed) > 1 or old:
            _log.info("targets", addresses=listed)

    def _has_substitute(self, address: str) -> bool:
        """Return whether another ready target serves the same model."""
        member = self._members.get(address)
        return member is not None and any(
            one is not member and one.client.ready and one.model_key == member.model_key
            for one in self.members
        )

    def _dismiss_idle(self) -> None:
        """Close the connections of targets that are no longer listed and have no sequences."""
        for address, member in list(self._members.items()):
            if not member.listed and not member.running:
                del self._members[address]
                task = asyncio.create_task(member.client.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _announce(self) -> None:
        """Note that a target has changed."""
        self._groups.clear()
        self.readiness.set(any(one.client.ready for one in self.members))
        self._change.set()
        self._change = asyncio.Event()

    def _group(self, model_id: str | None) -> _Group | None:
        if model_id not in self._groups:
            group = self._groups[model_id] = self._find_group(model_id)
            if group is not None:
                self._last_info[model_id] = group.info
        return self._groups[model_id]

    def _find_group(self, model_id: str | None) -> _Group | None:
        """Return the targets that serve a model name, or None.

        Targets with the same name can have different weights, for example during an update. In this case,
        return the targets that have the weights of the first listed target that is ready.
        """
        known = [(one, info) for one in self.members if (info := one.client.known_info) is not None]
        if not known:
            return None
        name = known[0][1].model_id if model_id is None else model_id
        named = [(one, info) for one, info in known if info.model_id == name]
        if not named:
            return None
        first = next((one for one, _ in named if one.client.ready), named[0][0])
        group = [(one, info) for one, info in named if one.model_key == first.model_key]
        return _Group(first.model_key, tuple(one for one, _ in group), _common([info for _, info in group]))

    def unavailable(self, model_id: str | None = None) -> UnavailableError:
        """Return the error for a request whose model no target can serve now."""
        addresses = [one.address for one in self.members]
        if len(addresses) == 1:
            what = f"The target service at {addresses[0]} is not ready."
        elif model_id is None or not addresses:
            what = f"None of the {len(addresses)} targets is ready."
        else:
            what = f"No target of the model {model_id!r} is ready."
        return UnavailableError(f"{what} Retry shortly.", reason="target_unavailable", retry_after_s=1.0)


class ModelTargets:
    """The targets of one model. With `model_id` None, this is the model of the first listed target."""

    def __init__(self, pool: TargetPool, model_id: str | None = None) -> None:
        self._pool = pool
        self.model_id = model_id

    @property
    def name(self) -> str:
        """Name of the model, as its targets report it. Empty if none of them has ever been connected."""
        try:
            return self.info.model_id
        except UnavailableError:
            return ""

    @property
    def ready(self) -> bool:
        """Whether a sequence can be submitted."""
        return self._pool.is_ready(self.model_id)

    @property
    def info(self) -> ServedTarget:
        """The information that all of these targets share, from their last connection or refresh.

        Raises:
            UnavailableError: If none of these targets has ever been connected.
        """
        return self._pool.info(self.model_id)

    def submit(self, request: GenerationRequest) -> MovableStream:
        """Start a sequence.

        Raises:
            UnavailableError: If no target is connected and serving.
        """
        return self._pool.submit(request, self.model_id)


def _common(infos: Sequence[ServedTarget]) -> ServedTarget:
    """Return the information of the first target, but with limits that all targets satisfy."""
    if len(infos) == 1:
        return infos[0]
    names = ("max_model_len", "max_steps", "max_topk", "max_nodes")
    return replace(infos[0], **{name: min(getattr(one, name) for one in infos) for name in names})
