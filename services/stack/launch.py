"""Starts the services of `outrider up`: checks options and PyTorch, builds commands, waits for readiness."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import ssl
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from outrider.services.stack.liveness import Liveness, service_probes, service_sockets
from outrider.services.stack.mps import shared_gpu
from outrider.services.stack.option_checks import DEFAULT_MAX_SESSIONS, check_values
from outrider.services.stack.options import INPROC, StackOptions, Transport
from outrider.services.stack.placement import place_draft, usable_gpus
from outrider.services.stack.private_folder import private_folder, restore
from outrider.services.stack.service_checks import (
    check_gateway_flags,
    check_model_folder,
    check_target_flags,
    gateway_context,
)
from outrider.services.stack.shared_cache import shared_kv_tokens
from outrider.services.stack.supervisor import ChildSpec, Echo, Supervisor, Surroundings
from outrider.shared.base.errors import CancelledError, ConfigurationError, UnavailableError
from outrider.shared.spec.algorithm import Algorithm, check_given

OnStage = Callable[[str], None]

OWN_PORTS = range(20_000, 32_000)
"""Ports from which `free_port` chooses. Linux assigns ports to connections from a higher range (32768 and
up)."""
START_TIMEOUT_S = 600.0
POLL_S = 0.05
DRAFT_DRAIN_S = 10.0
DRAIN_S = 40.0
DRAIN_SETTINGS = ("drain_notice_s", "drain_grace_s")
TRACE_SETTINGS = ("otlp_endpoint", "trace_share")
STOP_S = 10.0
"""Seconds that a gateway needs to stop after its drain has reached the time limit."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Command lines and addresses of one stack, which consists of a gateway, a target and a draft.

    Attributes:
        children: Processes in the order in which they are drained: gateway, target and draft.
        url: REST address of the gateway.
        target_address: gRPC address of the target.
        draft_address: gRPC address of the draft, or None if the draft has no process of its own.
    """

    children: tuple[ChildSpec, ...]
    url: str
    target_address: str
    draft_address: str | None


def plan_stack(options: StackOptions, runtime_dir: Path, inproc: bool) -> StackPlan:
    """Return the command lines of the processes that `outrider up` starts.

    The services connect through unix sockets in `runtime_dir`. Only the gateway listens on TCP ports.

    Args:
        options: Options of `outrider up`.
        runtime_dir: A private folder. Its path must be short enough for socket names (about 90 characters).
        inproc: True if the draft runs inside the target's process.
    """
    target_address = f"unix:{runtime_dir / 'target.sock'}"
    by_ipc = options.transport is Transport.IPC or (options.mps and options.transport is Transport.AUTO)
    scheme = "ipc://" if by_ipc else "unix:"
    draft_address = f"{scheme}{runtime_dir / 'draft.sock'}" if options.speculates and not inproc else None
    # 1. Flags that several services share.
    shape = {
        "num-steps": options.num_steps,
        "topk": options.topk,
        "num-draft-tokens": options.num_draft_tokens,
    }
    caps = {"max-steps": options.max_steps, "max-topk": options.max_topk, "max-nodes": options.max_nodes}
    placement = {
        "device": options.device,
        "dtype": options.dtype,
        "log-level": options.log_level,
        "log-json": options.log_json or None,
        "kv-tokens": options.kv_tokens,
    }
    algorithm = {
        "speculative-algorithm": None if options.algorithm is Algorithm.AUTO else options.algorithm.value
    }
    texts = {"speculative-token-map": options.token_map, "ngram-corpus": options.ngram_corpus}
    capacity = {
        "max-running-requests": options.max_running_requests,
        "mem-fraction-static": options.mem_fraction_static,
        "tp": options.tp,
    }

    # 2. The gateway.
    gateway = {
        "host": options.host,
        "port": options.port,
        "grpc-port": options.grpc,
        "target": target_address,
    }
    gateway |= {
        "tokenizer": None if options.skip_tokenizer else options.target,
        "log-level": options.log_level,
        "log-json": options.log_json or None,
    }
    settings = dict(options.gateway_settings)
    keys = _texts(settings.pop("api_key", ()))
    gateway |= {name.replace("_", "-"): value for name, value in settings.items()}
    # Give each child more time than its requests get to drain, or the supervisor would cut them off.
    drain_s = max(DRAIN_S, sum(float(str(settings.get(name) or 0)) for name in DRAIN_SETTINGS) + STOP_S)

    # 3. The target. As in SGLang, EAGLE can also mean MTP layers. A draft process reads from the checkpoint
    # whether the draft is a head or MTP layers. The target is therefore started without the algorithm's name,
    # and accepts both kinds.
    drafter = draft_address or (f"{INPROC}{options.draft or ''}" if options.speculates else "none")
    target_algorithm = {} if draft_address and options.algorithm is Algorithm.EAGLE else algorithm
    target = (
        {"listen": target_address, "model": options.target, "draft": drafter}
        | {"served-model-id": options.model_id}
        | target_algorithm
        | shape
        | caps
        | placement
        | capacity
    )
    target |= {name.replace("_", "-"): value for name, value in options.target_settings.items()}
    # The gateway and the target both count waiting requests. Give both the same limit, or the smaller one
    # decides.
    target["max-queued-requests"] = settings.get("max_queued_requests")
    traces = {name.replace("_", "-"): settings.get(name) for name in TRACE_SETTINGS}
    target |= traces
    children = [
        replace(
            _child("gateway", gateway, drain_s),
            secrets={"OUTRIDER_GATEWAY_API_KEY": json.dumps(keys)} if keys else {},
        ),
        _child("target", target | (texts if options.speculates and inproc else {})),
    ]

    # 4. The draft, if it has its own process.
    if draft_address:
        draft = (
            {"listen": draft_address, "draft": options.draft, "target-weights": options.target}
            | algorithm
            | texts
            | caps
            | placement
            | traces
        )
        if options.draft_device != "auto":
            draft["device"] = options.draft_device
        draft |= shape
        draft |= {
            name.replace("_", "-"): options.target_settings.get(name)
            for name in ("cuda_graph_max_bs", "disable_cuda_graph")
        }
        draft["max-sessions"] = _sessions(options.max_running_requests)
        draft["disable-tile-trial"] = options.target_settings.get("disable_tile_trial")
        children.append(replace(_child("draft", draft, DRAFT_DRAIN_S), standby=options.standby))
    encrypted = settings.get("tls_cert") or os.environ.get("OUTRIDER_GATEWAY_TLS_CERT")
    url = f"{'https' if encrypted else 'http'}://{_reachable(options.host)}:{options.port}"
    return StackPlan(tuple(children), url, target_address, draft_address)


def _sessions(running: int | None) -> int | None:
    """Return the draft's session limit for this many running sequences, or None for the draft's default."""
    return running if running is not None and running > DEFAULT_MAX_SESSIONS else None


def _reachable(host: str) -> str:
    """Return an address at which this machine can reach a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _child(service: str, flags: Mapping[str, object], drain_s: float = DRAIN_S) -> ChildSpec:
    given: list[str] = []
    for flag, value in flags.items():
        if isinstance(value, list | tuple):
            for item in value:
                given += (f"--{flag}", str(item))
        elif isinstance(value, bool):
            given.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            given += (f"--{flag}", str(value))
    # Only the gateway needs its API keys.
    hidden = () if service == "gateway" else ("OUTRIDER_GATEWAY_API_KEY",)
    return ChildSpec(service, (outrider_command(), "serve", service, *given), drain_s, hidden)


def outrider_command() -> str:
    """Return the path of this environment's `outrider` script.

    Raises:
        ConfigurationError: The script is not installed.
    """
    script = Path(sysconfig.get_path("scripts")) / "outrider"
    found = str(script) if script.exists() else shutil.which("outrider")
    if not found:
        raise ConfigurationError(
            "The `outrider` command is not installed in this environment. Run: pip install outrider.",
            field="outrider",
        )
    return found


def check_options(options: StackOptions) -> None:
    """Reject invalid options before any process is started.

    The target checks the flags that only it reads: checking them needs torch, whose import takes seconds.

    Raises:
        ConfigurationError: An option is invalid. The message names the flag and the fix.
    """
    check_values(options)
    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError(
            "PyTorch is not installed, but the target and the draft need it. Run: pip install "
            "'outrider[engine]'.",
            field="torch",
        )
    check_model_folder(options.target, "--target")
    if options.algorithm is Algorithm.NONE and options.draft is not None:
        raise ConfigurationError(
            f"--draft {options.draft} conflicts with --speculative-algorithm NONE, which decodes without a "
            "draft. Remove one of the two flags.",
            field="--speculative-algorithm",
        )
    if options.speculates or options.algorithm is Algorithm.STANDALONE:
        check_given(options.algorithm, options.draft, options.target)
    if options.draft is not None:
        check_model_folder(options.draft, "--draft", " Use --draft none to serve without speculation.")
    if not options.skip_tokenizer and not (options.target / "tokenizer.json").exists():
        fix = "Add the file, or pass --skip-tokenizer to serve token ids only."
        raise ConfigurationError(f"--target {options.target} has no tokenizer.json. {fix}", field="--target")
    check_gateway_flags(options)
    # Otherwise `up` would notice a port in use only after it has started processes.
    for port in (options.port, options.grpc):
        if port == 0:
            continue
        with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.host, port))
            except OSError as error:
                what = (
                    "REST"
                    if port == options.port
                    else ("gRPC, the port after --port" if options.grpc_port is None else "gRPC, --grpc-port")
                )
                message = (
                    f"Cannot listen on {options.host}:{port} ({what}): {error.strerror}. Stop the process "
                    "that uses the port, or choose another --port."
                )
                raise ConfigurationError(message, field="--port") from None


def _texts(value: object) -> tuple[str, ...]:
    """Return the texts of a setting that takes several."""
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else (str(value),)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port. The next higher port is free too.

    Both ports lie outside the range from which the operating system assigns ports to outgoing connections.
    Other programs are therefore unlikely to occupy the ports before a service listens on them.
    """
    while True:
        port = OWN_PORTS[secrets.randbelow(len(OWN_PORTS))]
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind((host, port))
                second.bind((host, port + 1))
            except OSError:
                continue
            return port


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack: its addresses and its supervisor."""

    plan: StackPlan
    supervisor: Supervisor

    @property
    def url(self) -> str:
        """The gateway's REST address."""
        return self.plan.url


@contextmanager
def running_stack(
    options: StackOptions, echo: Echo, progress: OnStage, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Stack]:
    """Start the gateway, the target and the draft, wait until all are ready, and stop them on exit.

    Args:
        options: Models and settings to serve.
        echo: Called with (service, line) for each line that a service prints.
        progress: Called with a message about where the draft runs, and each time a service becomes ready.
        stopped: Function that is polled during startup. Startup is abandoned when the function returns True.

    Yields:
        The running stack.

    Raises:
        ConfigurationError: An option is invalid, or a service stopped during startup.
        UnavailableError: The services were not ready within `START_TIMEOUT_S`.
        CancelledError: `stopped` returned True during startup.
    """
    check_options(options)
    with ExitStack() as cleanup:
        runtime_dir = cleanup.enter_context(private_folder())
        inproc = False
        if options.speculates:
            placed = place_draft(options, usable_gpus())
            progress(str(placed))
            inproc = placed.inproc
            options = replace(options, transport=placed.transport, draft_device=placed.draft_device)
        if not inproc:
            options = replace(options, kv_tokens=options.kv_tokens or shared_kv_tokens(options))
        plan = plan_stack(options, runtime_dir, inproc)
        around = (
            cleanup.enter_context(shared_gpu(runtime_dir / "mps", echo)) if options.mps else Surroundings()
        )
        around = replace(around, before_start=partial(restore, runtime_dir))
        supervisor = cleanup.enter_context(Supervisor(plan.children, echo, around))
        verify = gateway_context(options)
        try:
            _wait_until_ready(plan, supervisor, progress, stopped, verify())
        except ConfigurationError:
            # If the target refused a flag, raise its error, which names the flag.
            check_target_flags(options, own_process=options.speculates and not inproc)
            raise
        supervisor.settle()
        probes = service_probes(plan.url, plan.target_address, plan.draft_address, cleanup, verify)
        sockets = service_sockets(plan.target_address, plan.draft_address)
        cleanup.enter_context(Liveness(supervisor, probes, sockets))
        yield Stack(plan, supervisor)


def _wait_until_ready(
    plan: StackPlan,
    supervisor: Supervisor,
    progress: OnStage,
    stopped: Callable[[], bool],
    verify: ssl.SSLContext | bool,
) -> None:
    from outrider.services.clients.health import DRAFT_SERVICE, TARGET_SERVICE, ServingProbe
    from outrider.services.clients.rest import RestClient
    from outrider.shared.rpc.address import grpc_address

    started = time.monotonic()
    with ExitStack() as cleanup:
        gateway = cleanup.enter_context(RestClient(plan.url, verify=verify))
        target = cleanup.enter_context(ServingProbe(plan.target_address, TARGET_SERVICE))
        waiting: dict[str, Callable[[], bool]] = {}
        if plan.draft_address:
            waiting["draft"] = cleanup.enter_context(
                ServingProbe(grpc_address(plan.draft_address, "draft"), DRAFT_SERVICE)
            ).serving
        waiting["target"] = target.serving
        # Query the gateway last, because the gateway becomes ready only after the target.
        waiting["gateway"] = lambda: len(waiting) == 1 and gateway.status("/ready")[0] == 200
        while waiting:
            if stopped():
                raise CancelledError("Stopped while the services were starting.")
            if failed := supervisor.failed():
                raise _start_failure(
                    failed.spec.name, failed.last_lines[-1] if failed.last_lines else "it printed nothing"
                )
            if time.monotonic() - started > START_TIMEOUT_S:
                raise UnavailableError(
                    f"Not ready after {START_TIMEOUT_S:g} s: {', '.join(waiting)}. See the log lines above "
                    "for their progress."
                )
            for name in [name for name, ready in waiting.items() if ready()]:
                del waiting[name]
                progress(f"{name} ready after {time.monotonic() - started:.1f} s")
            time.sleep(POLL_S)


def _start_failure(service: str, last_line: str) -> ConfigurationError:
    return ConfigurationError(f"The {service} service stopped while starting: {last_line}", field=service)
