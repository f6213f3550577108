"""Sampling defaults of a model: which values are read, and which requests use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.services.gateway.parameters import COMPLETIONS, Parameters, RequestBuilder
from outrider.services.gateway.requested_rules import RequestedRules
from outrider.services.gateway.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from outrider.services.gateway.served_target import ServedTarget
from outrider.services.gateway.settings import GatewaySettings
from outrider.shared.base.errors import CheckpointError
from outrider.shared.base.generation import SamplingParams

INFO = ServedTarget("m", "a", 100, 64, frozenset(), "f", "cpu", "f", "w", 4, "", "", 0, 0, 0, 0, 0, 0, "none")


def written(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def test_known_values_are_read(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == NO_DEFAULTS
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_length": 9}
    folder = written(tmp_path, json.dumps(content))
    assert SamplingDefaults.load(folder) == SamplingDefaults(0.6, 20, 0.95, None, 1.05)
    assert SamplingDefaults.load(folder / "generation_config.json").top_k == 20


@pytest.mark.parametrize("text", ["{", "[]", '{"top_p": 2}', '{"temperature": "hot"}', '{"top_k": true}'])
def test_broken_files_are_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        SamplingDefaults.load(written(tmp_path, text))


def sampling_of(parameters: Parameters, defaults: SamplingDefaults) -> SamplingParams:
    builder = RequestBuilder(GatewaySettings(), None, defaults)
    return builder.build([(1, 2)], parameters, COMPLETIONS, INFO, deadline=1.0)[0].sampling


def test_only_absent_parameters_have_defaults() -> None:
    defaults = SamplingDefaults(0.6, 20, 0.9, 0.1, 1.2)
    found = sampling_of(Parameters(), defaults)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.6, 20, 0.9, 0.1)
    assert found.rules.repetition_penalty == 1.2
    given = Parameters(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, rules=RequestedRules(repetition_penalty=1.0)
    )
    found = sampling_of(given, defaults)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.0, 0, 1.0, 0.0)
    assert found.rules.neutral
    assert sampling_of(Parameters(), NO_DEFAULTS).temperature == 1.0
