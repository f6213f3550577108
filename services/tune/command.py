"""Runs `outrider tune`: starts a server, or uses a running one, searches, and writes the profile."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from outrider.services.clients.rest import RestClient
from outrider.services.doctor.prompts import read_prompts
from outrider.services.stack.launch import free_port
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.services.tune.live import LiveClient
from outrider.services.tune.plot import write_pictures
from outrider.services.tune.profile import profile_text, write_profile
from outrider.services.tune.report import print_result, result_json
from outrider.services.tune.result import TuneSizes
from outrider.services.tune.run_count import RunCount
from outrider.services.tune.search import search
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.open import read_model_config
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.tree import DraftShape


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Options of `outrider tune`.

    Attributes:
        stack: Options for starting a server: the target, the draft and the device.
        url: Address of a running server to use. None starts a new server.
        api_key: API key of the running server, if it requires one.
        prompts: JSON lines file with prompts. None selects the built-in prompts.
        num_prompts, tokens: Number of prompts, and largest length of each answer in tokens.
        batches: Numbers of concurrent requests.
        exhaustive: True to measure every shape instead of those with the best predictions.
        check: Number of passes that compare the chosen shape with the best of all shapes; 0 for no check.
        output: The profile file to write.
        plot: Name of the SVG pictures to write, or None. The name of the colour theme is added to this name.
        as_json: True to print one JSON object instead of a table.
    """

    stack: StackOptions
    output: Path
    url: str | None = None
    api_key: str | None = None
    prompts: Path | None = None
    num_prompts: int = 16
    tokens: int = 64
    batches: Sequence[int] = (1, 4, 16)
    exhaustive: bool = False
    check: int = 0
    plot: Path | None = None
    as_json: bool = False


def run_tune(options: TuneOptions) -> int:
    """Run `outrider tune`: search for the best mode and shapes, write the profile, and print the result.

    Returns:
        The exit code, 0.

    Raises:
        ConfigurationError: An option is invalid, or no draft is given.
        OutriderError: The server could not start, or a request failed.
    """
    if not options.stack.speculates:
        raise ConfigurationError(
            "tune compares tree shapes. Give a draft with --draft or --speculative-algorithm.",
            field="--draft",
        )
    vocabulary = read_model_config(options.stack.target).vocab_size
    prompts = read_prompts(options.prompts, options.stack.target, vocabulary, options.num_prompts)
    progress = Console(stderr=True, highlight=False)
    for line in introduction(options, len(prompts)):
        progress.print(line, soft_wrap=True)
    with _server(options, progress) as url, RestClient(url, options.api_key) as client:
        sizes = TuneSizes(
            options.batches,
            options.tokens,
            _limits(client),
            exhaustive=options.exhaustive,
            check=options.check,
        )
        with Progress("tune", 1.0, counts=False, console=progress) as bar:
            count = RunCount(bar, sizes, len(prompts))
            live = LiveClient(client.url, client.model, options.api_key, count.ran)
            result = search(live, prompts, sizes, lambda line: _print_step(progress, line), count.batch_done)
        target = client.model
    draft = options.stack.draft.name if options.stack.draft else options.stack.algorithm.value
    write_profile(options.output, profile_text(result, target, draft))
    if options.as_json:
        print(json.dumps(result_json(result), indent=1))
    else:
        print_result(result, Console(highlight=False))
    if options.plot is not None:
        names = [str(path) for path in write_pictures(options.plot, result, target, draft)]
        progress.print(f"pictures: {', '.join(names)}")
    progress.print(f"profile: {options.output} (load it with `outrider up --profile {options.output}`)")
    return 0


def introduction(options: TuneOptions, num_prompts: int) -> list[str]:
    """Return lines that say what will be measured, about how long this takes, and where the profile goes."""
    *others, last = map(str, options.batches)
    batches = f"{', '.join(others)} and {last} requests" if others else f"{last} requests"
    batches = "one request" if batches == "1 requests" else batches
    what = "every tree shape" if options.exhaustive else "the most promising tree shapes"
    extra = " --check adds a measurement of every shape." if options.check else ""
    return [
        f"Measures plain decoding, mode auto and {what} on {num_prompts} prompts, with answers of up to "
        f"{options.tokens} tokens, for {batches} at a time.{extra}",
        "With the default flags and the embedded pair, this takes two to four minutes on two CPU cores. "
        "Larger models take longer. Ctrl-C stops it.",
        f"The profile goes to {options.output}"
        + (", which exists and is overwritten." if options.output.exists() else "."),
    ]


@contextmanager
def _server(options: TuneOptions, progress: Console) -> Iterator[str]:
    """Yield the address of a server. If none is given, start a server for the duration of the search."""
    if options.url is not None:
        yield options.url
        return
    stack_options = replace(options.stack, port=free_port(), grpc_port=0, log_level="warning")
    running = started_services(stack_options, console=progress, tell=lambda line: _print_step(progress, line))
    with running as stack:
        yield stack.url


def _print_step(progress: Console, line: str) -> None:
    progress.print(f"  [dim]{line}[/]", soft_wrap=True)


def _limits(client: RestClient) -> DraftShape:
    info = client.get_json("/server_info")
    return DraftShape(
        int(info["speculative_max_steps"]),
        int(info["speculative_max_topk"]),
        int(info["speculative_max_nodes"]),
    )
