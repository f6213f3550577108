"""Runs `outrider doctor`: examines a pair, optionally probes it, and prints a table or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.services.doctor.examine import examine
from outrider.services.doctor.finding import DoctorReport, Finding, Severity
from outrider.services.doctor.pair import Pair
from outrider.services.doctor.probe import judge_probe, probe_numbers, run_probe
from outrider.services.doctor.prompts import read_prompts
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.nn.decoder import default_dtype
from outrider.shared.obs.logging import configure_logging
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.tree import DraftShape

COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.REFUSED: "bold red"}
VERDICTS = {
    Severity.OK: "This pair can be served.",
    Severity.WARNING: "This pair can be served, but read the warnings.",
    Severity.REFUSED: "This pair cannot be served.",
}
PIPE_WIDTH = 160
PROBE_SHAPE = DraftShape(depth=5, topk=4, max_nodes=16)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of `outrider doctor`.

    Attributes:
        target: Folder of the target.
        draft: Folder of a head or a draft model, or None.
        algorithm: Value of `--speculative-algorithm`.
        token_map: Value of `--speculative-token-map`.
        device, dtype: Device and data type in the services' notation, including ``auto``.
        probe: True to answer prompts with the target and the draft, and to measure their accept length.
        prompts: JSON lines file with the probe's prompts. None selects the built-in prompts.
        num_prompts, tokens: Number of prompts, and length of each answer in tokens.
        shape: Shape of the probe's draft trees.
        as_json: True to print one JSON object instead of a table.
    """

    target: Path
    draft: Path | None
    algorithm: Algorithm = Algorithm.AUTO
    token_map: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    probe: bool = False
    prompts: Path | None = None
    num_prompts: int = 16
    tokens: int = 64
    shape: DraftShape = PROBE_SHAPE
    as_json: bool = False


def run_doctor(options: DoctorOptions) -> int:
    """Run `outrider doctor`: examine a target and a draft, and print the report.

    Returns:
        Exit code: 0 if target and draft can be served, or 2 if they would be refused.

    Raises:
        ConfigurationError: A flag is invalid.
    """
    configure_logging("doctor", "warning")
    device = torch_device(options.device)
    pair = Pair(
        options.target,
        options.draft,
        options.algorithm,
        device,
        dtype_of_flag(options.dtype, device),
        options.token_map,
    )
    report = examine(pair)
    if options.probe:
        report = _probed(report, pair, options)
    if options.as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_doctor_report(
            report, Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        )
    return report.exit_code


def print_doctor_report(report: DoctorReport, console: Console) -> None:
    """Print the findings as a table, each with its fix on the next line. Then print the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in report.findings:
        text = Text.assemble((f"{finding.field}: ", "cyan"), finding.message)
        if finding.fix:
            text.append(f"\n→ {finding.fix}", style="bold")
        table.add_row(Text(finding.severity.value, COLOURS[finding.severity]), finding.check, text)
    console.print(table)
    console.print(Text(VERDICTS[report.severity], COLOURS[report.severity]))


def _probed(report: DoctorReport, pair: Pair, options: DoctorOptions) -> DoctorReport:
    """Add a measured run to a report, unless the pair cannot be loaded."""
    if report.severity is Severity.REFUSED:
        found = [Finding.ok("--probe", "not run, because the pair would be refused")]
        numbers = {}
    elif not pair.drafts:
        raise ConfigurationError(
            "--probe measures a draft. Give one with --draft or --speculative-algorithm.", field="--probe"
        )
    else:
        try:
            prompts = read_prompts(
                options.prompts, pair.target, pair.target_config.vocab_size, options.num_prompts
            )
            measured = run_probe(pair, prompts, options.tokens, options.shape)
            found, numbers = list(judge_probe(measured)), {"probe": probe_numbers(measured)}
        except OutriderError as error:
            found, numbers = [Finding.of_error(error)], {}
    findings = (*report.findings, *(replace(finding, check="probe") for finding in found))
    return replace(report, findings=findings, numbers={**report.numbers, **numbers})


def torch_device(name: str) -> torch.device:
    """Return the device of the flag `--device`.

    Raises:
        ConfigurationError: The name is unknown, or there is no GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(
            f"--device: {name!r} is not one of auto, cpu, cuda or cuda:N.", field="device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "--device is cuda, but torch finds no GPU. Use --device cpu.", field="device"
        )
    return device


def dtype_of_flag(name: str, device: torch.device) -> torch.dtype:
    """Return the data type of the flag `--dtype`.

    Raises:
        ConfigurationError: The name is unknown.
    """
    if name == "auto":
        return default_dtype(device)
    if name not in DTYPES:
        raise ConfigurationError(f"--dtype: {name!r} is not one of auto, {', '.join(DTYPES)}.", field="dtype")
    return DTYPES[name]
