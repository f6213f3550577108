"""Lists the CUDA graphs of verify passes and rounds to record at start-up or after a change of the draft."""

from __future__ import annotations

from collections.abc import Callable

from outrider.services.target.engine.device_loop import DeviceLoop
from outrider.services.target.model.input_batch import SamplingMode
from outrider.services.target.model.model_runner import ModelRunner
from outrider.shared.spec.tree import DraftShape

USUAL_MODES = (SamplingMode.NOISE, SamplingMode.GREEDY)
"""Sampling modes whose graphs are recorded in advance. Other modes are recorded after some use."""


def host_recordings(runner: ModelRunner, bs: int, shape: DraftShape) -> list[Callable[[], None]]:
    """Return functions that each record the verify pass of rounds through the host for one sampling mode."""
    return [
        lambda mode=mode: runner.capture_verify(bs, shape.max_nodes, mode)  # type: ignore[misc]
        for mode in USUAL_MODES
    ]


def device_recordings(
    runner: ModelRunner, loop: DeviceLoop, bs: int, shape: DraftShape
) -> list[Callable[[], None]]:
    """Return functions that each record one round that stays on the device."""
    # Plain rounds store feature rows only if their sequences use drafts in other rounds. Record both
    # variants.
    kinds = [runner.captures] if shape.drafts or not runner.captures else [True, False]
    return [
        lambda mode=mode, capture=kind: loop.capture(bs, shape, mode, capture)  # type: ignore[misc]
        for mode in USUAL_MODES
        for kind in kinds
    ]
