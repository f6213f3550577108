"""The command `outrider bench forms`, with its flags."""

from __future__ import annotations

from pathlib import Path
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
    own_stack,
    result_file,
)
from outrider.services.stack.options import Transport
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.lifecycle import leave_on_terminate


def forms(
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with the fields `topic`, `prompt` and `schema`.",
            show_default="the embedded prompts with schemas",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts to use.", show_default="all")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Largest number of tokens per answer.")] = 256,
    num_steps: Annotated[int, typer.Option(min=1, help="Depth of the draft trees.")] = 5,
    topk: Annotated[int, typer.Option(min=1, help="Branches of the draft trees.")] = 4,
    num_draft_tokens: Annotated[
        int, typer.Option(min=2, help="Nodes of the draft trees, including the root.")
    ] = 16,
    target: TargetDir = None,
    draft: DraftDir = None,
    transport: StackTransport = Transport.AUTO,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Compare the accept lengths of answers with and without a JSON schema, end to end (real acceptance)."""
    from outrider.bench.measure.forms import FORM_PROMPTS, FormsOptions, run_forms
    from outrider.shared.spec.tree import DraftShape

    leave_on_terminate()
    stack = own_stack(target, draft, transport, device, dtype)
    if stack.draft is None:
        raise ConfigurationError(
            "Without a draft there is nothing to measure. Give --draft DIR.", field="--draft"
        )
    raise typer.Exit(
        run_forms(
            FormsOptions(
                stack,
                prompts or FORM_PROMPTS,
                num_prompts,
                tokens,
                DraftShape(num_steps, topk, num_draft_tokens),
                result_file(output, "forms", device, force),
            )
        )
    )
