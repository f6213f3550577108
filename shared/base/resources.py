"""What a target uses: memory, CUDA graphs, and the connection to its draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ResourceStats:
    """Memory and CUDA graphs of a target, and its connection to its draft.

    Attributes:
        weight_bytes, kv_bytes: Memory of the process's weights, and of its K/V cache with feature rows.
        process_bytes: Resident host memory of the process. 0 if Linux's /proc is not there.
        gpu_used_bytes, gpu_total_bytes: Memory of the GPU that all processes use, and its size. Both are 0 on
            a CPU.
        graphs_recorded, graph_bytes: Number of recorded CUDA graphs, and the device memory that they use.
        graphs_left: Number of planned CUDA graphs that are not recorded yet.
        draft_transport: ``none``, ``inproc``, ``ipc`` or ``grpc``. Empty if the target does not report it.
        draft_on_device: True if the trees of the last drafted round stayed on the devices, and False if they
            passed through the host. None before the first drafted round.
        draft_features: Names of the protocol features that target and draft use. Empty without a connection.
        draft_uptime_s: Seconds since the draft's process began to load. None without a connection, and for a
            draft in the target's process.
        draft_connections_lost: How often the connection to the draft was lost since the target's start.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    process_bytes: int = 0
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0
    graphs_recorded: int = 0
    graph_bytes: int = 0
    graphs_left: int = 0
    draft_transport: str = ""
    draft_on_device: bool | None = None
    draft_features: tuple[str, ...] = ()
    draft_uptime_s: float | None = None
    draft_connections_lost: int = 0

    @classmethod
    def total(cls, parts: Iterable[ResourceStats]) -> ResourceStats:
        """Return the sums over several targets. Transport and draft are those of the first target."""
        given = list(parts)
        names = [one.name for one in fields(cls) if not one.name.startswith("draft_")]
        return replace(given[0], **{name: sum(getattr(one, name) for one in given) for name in names})

    def as_json(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)
