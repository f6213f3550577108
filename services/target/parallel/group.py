"""Starts and ends the ranks of a tensor-parallel target, and runs the ranks other than 0.

Rank 0 serves requests. The other ranks are processes that rank 0 or `torchrun` starts.

1. All ranks connect to a common store. The ranks other than 0 open control connections to rank 0.
2. The ranks form a process group (NCCL or Gloo), and each rank loads its share of the weights.
3. In each step, rank 0 sends a command on the control connections. Then all ranks run the same collectives.

If a rank dies or stops, all ranks end, because a partial model cannot answer requests. The supervisor then
restarts the whole target.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from outrider.services.target.parallel.weights import Folder, RandomWeights, Weights, head_reader
from outrider.services.target.ranks import Ranks
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import layer_rounding, prepare_rank
from outrider.services.target.startup.weight_fit import check_weights_fit
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.base.errors import ConfigurationError, OutriderError, UnavailableError
from outrider.shared.nn.decoder import OnProgress, default_dtype
from outrider.shared.obs.logging import get_logger
from outrider.shared.obs.queued_stream import exit_now
from outrider.shared.parallel.channel import (
    RankConnection,
    RankReport,
    ReportKind,
    accept_ranks,
    beat_until_gone,
    connect_rank,
    store_of_these,
)
from outrider.shared.parallel.collectives import NO_MULTICAST, Collectives, TorchCollectives
from outrider.shared.parallel.decoder import ShardedDecoder, build_rank
from outrider.shared.parallel.lead import FailureHandler, Lead
from outrider.shared.parallel.lead_decoder import LeadDecoder
from outrider.shared.parallel.peer import connect_peers
from outrider.shared.parallel.reduce import Reduce
from outrider.shared.parallel.shard import Shard
from outrider.shared.parallel.worker import RankLost, Worker, report_failure

LOOPBACK = "127.0.0.1"
STORE_PREFIX = "outrider"
MEET_TIMEOUT_S = 180.0
LOAD_TIMEOUT_S = 3600.0
"""Limit in seconds for a rank that hangs while it loads its weights. A dead rank is detected immediately."""
END_GRACE_S = 5.0
"""Seconds from the loss of a rank until this process is killed. The time allows for an error report
and an orderly end."""
STOP_TIMEOUT_S = 10.0
FAILED_STOP_TIMEOUT_S = 2.0
"""Seconds for a broken group to stop. Less than `END_GRACE_S`, so that no hung rank outlives rank 0."""
AWAKE_S = 0.01
"""Busy-poll time of ranks on GPUs in seconds. Longer than a step, so decoding uses one CPU core per rank."""

_log = get_logger("outrider.target")


@dataclass(frozen=True, slots=True)
class Order:
    """The message to a rank that rank 0 starts: the settings, and the argument `random` of `start_group`."""

    settings: TargetSettings
    random: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        """Return the message as one line of JSON."""
        return json.dumps({"settings": self.settings.model_dump(mode="json"), "random": self.random})

    @classmethod
    def from_json(cls, line: str) -> Order:
        """Parse the output of `to_json`."""
        raw = json.loads(line)
        return cls(TargetSettings.load(raw["settings"]), raw["random"])

    def weights(self) -> Weights:
        """Return the source of the weights."""
        return Folder(self.settings.model) if self.random is None else RandomWeights(self.random)


class RankGroup:
    """Rank 0's control over all ranks of one model.

    Attributes:
        decoder: Runs each call on all ranks.
    """

    def __init__(
        self,
        decoder: LeadDecoder,
        lead: Lead,
        collectives: Collectives,
        processes: list[subprocess.Popen[bytes]],
    ) -> None:
        self.decoder = decoder
        self._lead = lead
        self._collectives = collectives
        self._processes = processes

    @property
    def failure(self) -> OutriderError | None:
        """The error that broke the group. None while the group works."""
        return self._lead.failure

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks that this process has started, in order from rank 1."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the other ranks, and wait for the rank processes that this process has started.

        All ranks must leave NCCL together, because leaving waits for the other ranks. If a rank does not
        leave within `STOP_TIMEOUT_S` seconds, this process exits without leaving NCCL.
        """
        self._lead.close()
        if self.failure is None:
            leaving = _in(STOP_TIMEOUT_S, self._give_up)
            self._collectives.close()
            leaving.cancel()
        _end(self._processes, STOP_TIMEOUT_S if self.failure is None else FAILED_STOP_TIMEOUT_S)

    def _give_up(self) -> None:
        """Exit without leaving NCCL. Leaving would block forever, because another rank does not leave."""
        _end(self._processes, 0.0)
        exit_now(1)


def end_soon(error: OutriderError) -> None:
    """End this process within `END_GRACE_S` seconds, even if its threads are blocked.

    By default, this function is called when a rank fails. Usually, a timer thread ends the process. While the
    interpreter shuts down, Python threads do not run, and a library may still wait for the device. In this
    case, an alarm signal ends the process.
    """
    signal.alarm(math.ceil(2 * END_GRACE_S))
    _in(END_GRACE_S, lambda: exit_now(1))


def _in(seconds: float, act: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


def start_group(
    settings: TargetSettings,
    on_failure: FailureHandler = end_soon,
    progress: OnProgress | None = None,
    *,
    random: Mapping[str, Any] | None = None,
) -> RankGroup:
    """Start all ranks of a tensor-parallel target and load the model on them. Called by rank 0.

    Args:
        settings: The target's settings, with `tp` above 1.
        on_failure: Called from another thread if a rank fails later. The function must end this process.
        progress: Receives the loading progress of rank 0.
        random: The content of config.json for a model with random weights. None loads `settings.model`.

    Raises:
        ConfigurationError: The model cannot be split or does not fit, or an environment variable is wrong.
        CheckpointError: Rank 0 cannot load the checkpoint.
        OutriderError: Another rank failed or did not connect.
    """
    # 1. Check the configuration before starting any process.
    order = Order(settings, random)
    device, ranks = settings.torch_device(), settings.ranks()
    dtype = settings.torch_dtype() or default_dtype(device)
    weights = order.weights()
    shard = Shard.of(weights.config(), 0, settings.tp)
    rounding = layer_rounding(settings, shard.config, device, dtype)
    if random is None:
        check_weights_fit(settings)
    # 2. Start the other ranks and accept their control connections.
    store, processes = _meet(order, ranks)
    try:
        connections = accept_ranks(
            store,
            ranks.host if ranks else LOOPBACK,
            settings.tp,
            MEET_TIMEOUT_S,
            check=lambda: _check_alive(processes),
        )
    except BaseException:
        _end(processes)
        raise

    def failed(error: OutriderError) -> None:
        on_failure(error)
        # This process may end without reaching `RankGroup.close`, so a timer ends the other ranks.
        _in(FAILED_STOP_TIMEOUT_S, lambda: _end(processes, 0.0))

    lead = Lead(connections, failed, settings.tp_timeout_s, bounded=device.type == "cpu")
    # 3. Load this rank's share and compare fingerprints with the other ranks.
    try:
        collectives, reduce = _join_group(store_of_these(store), shard, device, dtype, settings, ranks)
        with weights.open(shard.config, device, dtype, progress) as checkpoint:
            decoder = build_rank(LeadDecoder, checkpoint, shard, collectives, reduce, rounding)
        decoder.connect(lead, head_reader(weights, shard.config, device, dtype))
        for rank, fingerprint in lead.wait_done(LOAD_TIMEOUT_S).items():
            if fingerprint != decoder.fingerprint:
                raise ConfigurationError(
                    f"model: rank {rank} has other weights than rank 0; use one checkpoint on all hosts.",
                    field="model",
                )
    except BaseException as error:
        failure = lead.failure  # the failure of another rank may have caused the error on this rank
        lead.close()
        _end(processes)
        if failure is not None and isinstance(error, Exception):
            raise failure from error
        raise
    group = RankGroup(decoder, lead, collectives, processes)
    _log.info(
        "ranks ready",
        ranks=settings.tp,
        device=str(device),
        weight_bytes=decoder.weight_bytes,
        processes=group.process_ids,
    )
    return group


def run_rank(order: Order, ranks: Ranks) -> int:
    """Serve as rank 1 or above until rank 0 sends a stop command, and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first and then sends the stop command
    settings, device = order.settings, order.settings.torch_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(settings.cpu_threads())
    connection = connect_rank(_join(ranks), ranks.rank, MEET_TIMEOUT_S)
    beat_until_gone(connection, END_GRACE_S)
    try:
        decoder = _load_rank(order, ranks, device)
        connection.report(RankReport(ReportKind.DONE, decoder.fingerprint))
        attention = prepare_rank(settings, decoder)
    except Exception as error:
        report_failure(connection, error)
        return 1
    return _mirror(decoder, attention, connection)


def _load_rank(order: Order, ranks: Ranks, device: torch.device) -> ShardedDecoder:
    settings, weights = order.settings, order.weights()
    dtype = settings.torch_dtype() or default_dtype(device)
    shard = Shard.of(weights.config(), ranks.rank, ranks.size)
    if order.random is None:
        check_weights_fit(settings)
    collectives, reduce = _join_group(store_of_these(_join(ranks)), shard, device, dtype, settings, ranks)
    with weights.open(shard.config, device, dtype) as checkpoint:
        return build_rank(
            ShardedDecoder,
            checkpoint,
            shard,
            collectives,
            reduce,
            layer_rounding(settings, shard.config, device, dtype),
        )


def _mirror(decoder: ShardedDecoder, attention: AttentionBackend, connection: RankConnection) -> int:
    connection.awake_s = AWAKE_S if decoder.device.type == "cuda" else 0.0
    try:
        Worker(decoder, attention, connection).run()
    except RankLost:
        _log.error("rank 0 is gone")
        return 1
    except Exception:
        _log.exception("rank failed")
        return 1
    decoder.collectives.close()
    return 0


def _join_group(
    store: Store,
    shard: Shard,
    device: torch.device,
    dtype: torch.dtype,
    settings: TargetSettings,
    ranks: Ranks | None,
) -> tuple[Collectives, Reduce]:
    one_host = ranks is None or ranks.local_size == ranks.size
    group = TorchCollectives(store, shard.rank, shard.size, device, settings.tp_timeout_s)
    return connect_peers(
        group,
        shard.config.hidden_size,
        dtype,
        settings.tp_all_reduce,
        settings.tp_timeout_s,
        one_host=one_host,
    )


def _meet(order: Order, ranks: Ranks | None) -> tuple[Store, list[subprocess.Popen[bytes]]]:
    """Open the store on rank 0. Start the other ranks unless `torchrun` has started them."""
    if ranks is not None:
        return _join(ranks), []
    store = _local_store()
    size = order.settings.tp
    shared = Ranks(rank=0, size=size, local_rank=0, local_size=size, host=LOOPBACK, port=store.port)
    return PrefixStore(STORE_PREFIX, store), [_spawn(order, shared, rank) for rank in range(1, size)]


def _local_store() -> TCPStore:
    """Open a store that only this host can reach. By default, a store listens on all addresses."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return TCPStore(
            LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )


def _join(ranks: Ranks) -> Store:
    """Connect to the store. Rank 0 also serves the store, unless `torchrun` does.

    Raises:
        UnavailableError: The store cannot be reached.
    """
    try:
        store = TCPStore(
            ranks.host,
            ranks.port,
            is_master=ranks.rank == 0 and not ranks.agent_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_TIMEOUT_S),
        )
    except (DistError, RuntimeError) as error:
        raise UnavailableError(
            f"tp: the ranks' store at {ranks.host}:{ranks.port} cannot be reached: {error}", field="tp"
        ) from error
    return PrefixStore(STORE_PREFIX, store)


def _spawn(order: Order, shared: Ranks, rank: int) -> subprocess.Popen[bytes]:
    """Start a rank on this host with `torchrun`'s variables. The rank ends when rank 0 disconnects."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": shared.size,
        "LOCAL_WORLD_SIZE": shared.size,
        "MASTER_ADDR": shared.host,
        "MASTER_PORT": shared.port,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.services.target.parallel.rank_main"],
        stdin=subprocess.PIPE,
        env={**os.environ, **NO_MULTICAST, **{name: str(value) for name, value in variables.items()}},
        start_new_session=True,  # Ctrl-C in a terminal must reach rank 0 only
    )
    assert process.stdin is not None
    process.stdin.write(order.to_json().encode() + b"\n")
    process.stdin.close()
    return process


def _check_alive(processes: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(processes, 1):
        if process.poll() is not None:
            raise UnavailableError(
                f"tp: rank {rank} ended with code {process.returncode} during startup; see its output.",
                field="tp",
            )


def _end(processes: list[subprocess.Popen[bytes]], timeout_s: float = STOP_TIMEOUT_S) -> None:
    until = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
