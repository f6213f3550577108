"""The commands that disturb services: `outrider bench soak` and others, with their flags."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.bench.options import (
    Device,
    DraftDir,
    Dtype,
    Force,
    Output,
    StackTransport,
    TargetDir,
    draft_folder,
    numbers,
    own_stack,
    result_file,
)
from outrider.services.hub.pair import DEMO_TARGET
from outrider.services.stack.options import Transport
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.lifecycle import leave_on_terminate


def soak(
    minutes: Annotated[float, typer.Option(help="Duration of all phases together.")] = 30.0,
    clients: Annotated[
        int, typer.Option(min=1, help="Number of clients that each send one request after the other.")
    ] = 16,
    pause: Annotated[
        float, typer.Option(min=0.0, help="Seconds between the recovery from a fault and the next fault.")
    ] = 12.0,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 1,
    target: TargetDir = None,
    draft: DraftDir = None,
    transport: StackTransport = Transport.AUTO,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Restart every service repeatedly while clients send mixed requests; look for wrong tokens and leaks.

    The command starts the services, and first records the answer to every request. Then it repeatedly kills,
    suspends and terminates the draft, the target and the gateway, one service per phase. The last phase
    disturbs nothing. The exit code is 1 if an answer differs, a request fails without a reason, or something
    leaks.
    """
    from outrider.bench.faults.soak import SoakOptions, run_soak

    leave_on_terminate()
    if not minutes > 0:
        raise ConfigurationError(f"--minutes {minutes:g}: expected a number above 0.", field="--minutes")
    options = SoakOptions(
        stack=own_stack(target, draft, transport, device, dtype),
        minutes=minutes,
        clients=clients,
        pause_s=pause,
        seed=seed,
        output=result_file(output, "soak", device, force),
    )
    raise typer.Exit(run_soak(options))


def overload(
    requests: Annotated[
        int, typer.Option(min=10, help="Number of requests that are offered above the capacity.")
    ] = 500,
    capacity_seconds: Annotated[
        float, typer.Option(min=1.0, help="Duration of the measurement of the capacity.")
    ] = 45.0,
    max_tokens: Annotated[
        str, typer.Option(help="Tokens per answer. Each request draws one of these lengths.")
    ] = "16,64,128",
    max_queue_wait: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="--max-queue-wait-s of the gateway that is started; 0 sets no limit. By default, the "
            "gateway has its own default.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the arrival times and of the lengths.")] = 0,
    flood_share: Annotated[
        float, typer.Option(min=0.0, help="Share of the capacity that the limited key may use.")
    ] = 0.1,
    target: TargetDir = None,
    draft: DraftDir = None,
    transport: StackTransport = Transport.AUTO,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Send requests at 1.5 times the services' capacity, and measure TTFT, refusals and memory.

    The command starts the services and first measures their capacity. The requests do not wait for earlier
    answers (an open loop). For comparison, the command also sends requests at 0.8 times the capacity. It then
    sends the requests of one API key that stays within its limits: first alone, then while another key sends
    too many requests. Last, two clients of one key wait for their answers: first alone, then beside 60
    clients of a key whose limits allow --flood-share of the capacity. The exit code is 1 if a request fails
    without status 429 and Retry-After.
    """
    from outrider.bench.faults.overload import OverloadOptions, run_overload

    leave_on_terminate()
    options = OverloadOptions(
        stack=own_stack(target, draft, transport, device, dtype),
        requests=requests,
        capacity_s=capacity_seconds,
        max_tokens=numbers(max_tokens, "--max-tokens"),
        max_queue_wait_s=max_queue_wait,
        seed=seed,
        flood_share=flood_share,
        output=result_file(output, "overload", device, force),
    )
    raise typer.Exit(run_overload(options))


def move(
    streams: Annotated[int, typer.Option(min=2, help="Number of streams at the same time.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times that a target is killed.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=16, help="Tokens per answer.")] = 160,
    devices: Annotated[
        str, typer.Option(help="Devices of the two targets, such as cuda:0,cuda:1.")
    ] = "cpu,cpu",
    flag: Annotated[
        list[str] | None,
        typer.Option("--flag", help="NAME=VALUE for a flag of both targets, such as threads=1; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    target: TargetDir = None,
    draft: DraftDir = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Kill one of two targets that serve streams. The streams move to the other target.

    The command checks the tokens of the moved streams, and measures their pause. Each target has enough slots
    for all streams: --max-running-requests N, where N is --streams. Otherwise, moved streams would wait for
    slots, and their pauses would be longer. The exit code is 1 if a stream gets other tokens than in an
    undisturbed run.
    """
    from outrider.bench.faults.move import MoveOptions, run_move

    leave_on_terminate()
    places = [place.strip() for place in devices.split(",")]
    if len(places) != 2:
        raise ConfigurationError(f"--devices {devices}: expected two devices.", field="--devices")
    flags: list[str] = []
    for one in flag or ():
        name, equals, value = one.partition("=")
        flags += [f"--{name}", value] if equals else [f"--{name}"]
    options = MoveOptions(
        target=target or DEMO_TARGET,
        draft=draft_folder(target, draft),
        devices=places,
        streams=streams,
        rounds=rounds,
        prompt=prompt_tokens,
        new=new_tokens,
        flags=flags,
        seed=seed,
        output=result_file(output, "move", places[0], force),
    )
    raise typer.Exit(run_move(options))


def stall(
    streams: Annotated[int, typer.Option(min=1, help="Number of streams whose pauses are measured.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Number of times that each body is sent.")] = 3,
    quiet: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which the streams run without a body.")
    ] = 10.0,
    target: TargetDir = None,
    draft: DraftDir = None,
    transport: StackTransport = Transport.AUTO,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Send malformed and very large request bodies, and measure the longest pause of other streams meanwhile.

    The exit code is 1 if such a request is answered with a status of 500 or above.
    """
    from outrider.bench.faults.stall import StallOptions, run_stall

    leave_on_terminate()
    options = StallOptions(
        stack=own_stack(target, draft, transport, device, dtype),
        streams=streams,
        repeats=repeats,
        quiet_s=quiet,
        output=result_file(output, "stall", device, force),
    )
    raise typer.Exit(run_stall(options))
