"""`outrider verify` on the embedded pair: it passes, and it finds tokens that speculation changed."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from support.outputs.verify_coverage import COVERED, NOT_COMPARED
from tokenizers import Tokenizer
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.gateway.options.table import OPTIONS as REQUEST_OPTIONS
from outrider.services.target.request import EngineRequest
from outrider.services.verify import command
from outrider.services.verify.cases import OPTIONS, requests_of, ways, without_speculation
from outrider.services.verify.law import chi_square
from outrider.services.verify.logprobs import compare_logprobs
from outrider.services.verify.pair_engine import Answers, PairEngine
from outrider.services.verify.states import compare_states
from outrider.services.verify.texts import compare_texts, stop_text
from outrider.shared.base.constraint import ConstraintKind
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates
from outrider.shared.obs import progress
from outrider.shared.spec.tree import DraftShape

torch.set_num_threads(1)
DEMO = Path(__file__).parents[4] / "models" / "demo"
PAIR = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "eagle3"), "--device", "cpu", "--json"]

REQUESTS = requests_of([[5, 6]], 4, without_speculation(DraftShape(5, 4, 16)), [9], experts=True)


def run_verify(prompts: Path, *more: str) -> Result:
    prompts.write_text('{"prompt_ids": [5, 6, 7]}\n{"messages": [{"role": "user", "content": "Hi!"}]}\n')
    arguments = ["verify", *PAIR, "--prompts", str(prompts), "--tokens", "8", "--samples", "256", *more]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code in (0, 1), result.exception
    return result


def verify(prompts: Path, *more: str) -> tuple[int, dict[str, Any]]:
    result = run_verify(prompts, *more)
    return result.exit_code, json.loads(result.stdout)


def test_the_embedded_pair_passes_with_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    result = run_verify(tmp_path / "prompts.jsonl", "--dtype", "float32")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["passed"]) == (0, True)
    shown = [int(one) for one in re.findall(r"^verify: (\d+) %, about \d+ s left$", result.stderr, re.M)]
    assert shown == sorted(shown)
    assert shown[-1] == 99, "the bar should be full after the last answer, and only then"
    assert [run["name"] for run in report["runs"]] == ["chain", "tree", "auto", "mixed"]
    for run in report["runs"]:
        assert run["requests"] == 2 * (len(OPTIONS) - 1)
        assert (run["texts"]["compared"], run["texts"]["stopped"], run["texts"]["different"]) == (4, 4, [])
        assert run["differences"] == []
        assert run["logprobs"]["holds"]
        assert run["logprobs"]["compared"] > 2 * 8 * (6 + 21)
        assert run["states"]["holds"]
        assert run["states"]["compared"] > 2 * 8
    assert report["runs"][1]["accept_length"] > 1.2, "the run without drafted tokens would compare nothing"
    assert report["skipped"] == {"routed experts": "the target has no routed experts"}
    assert report["law"]["outcomes"] >= 8
    assert report["law"]["p_value"] > 1e-4


def test_tokens_and_probabilities_that_speculation_changes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced: one token of one request, every second token of the samples, a logprob, a hidden state."""
    answer = PairEngine.answer

    def changed(self: PairEngine, requests: Iterable[EngineRequest], *, speculate: bool) -> Answers:
        answers = answer(self, requests, speculate=speculate)
        for name, tokens in answers.tokens.items() if speculate else ():
            if name == "top_p, prompt 2":
                tokens[-1] ^= 1
            elif name.isdigit():
                tokens[1] = answers.tokens["1"][1]
        if speculate and (scores := answers.logprobs.get("logprobs, prompt 1")):
            scores[3] = replace(scores[3], logprob=scores[3].logprob - 0.5)
        if speculate and (states := answers.states.get("hidden states, prompt 2")):
            rows = bytearray(states[1].hidden_states)
            rows[:4] = struct.pack("<f", 100.0)
            states[1] = replace(states[1], hidden_states=bytes(rows))
        return answers

    monkeypatch.setattr(PairEngine, "answer", changed)
    tree = {"tree": ways(DraftShape(5, 4, 16))["tree"]}
    monkeypatch.setattr(command, "ways", lambda _shape: tree)
    code, report = verify(tmp_path / "prompts.jsonl", "--dtype", "float32", "--samples", "128")
    assert (code, report["passed"]) == (1, False)
    for run in report["runs"]:
        (difference,) = run["differences"]
        assert (difference["request"], difference["token"]) == ("top_p, prompt 2", 7)
        assert difference["off"] == difference["on"] ^ 1
        assert run["logprobs"]["holds"] is False
        assert run["logprobs"]["request"] == "logprobs, prompt 1"
        assert run["logprobs"]["largest"] == pytest.approx(0.5, abs=0.01)
        assert run["states"]["holds"] is False
        assert run["states"]["request"] == "hidden states, prompt 2"
        assert run["states"]["missing"] == 0
    assert report["law"]["holds"] is False


def test_missing_hidden_states_are_found() -> None:
    request = REQUESTS["hidden states, prompt 1"]
    name, row = request.request_id, struct.pack("<2f", 1.0, 2.0)
    off = Answers({name: [7, 4, 3]}, states={name: [TokenStates(0, 2, row * 2), TokenStates(2, 2, row * 2)]})
    on = Answers({name: [7, 4, 2]}, states={name: [TokenStates(0, 3, row * 3)]})
    found = compare_states({name: request}, off, on, torch.float32)
    assert (found.compared, found.missing, found.largest, found.holds) == (3, 1, 0.0, False)
    on.states[name] = off.states[name]
    assert compare_states({name: request}, off, on, torch.float32).holds


@pytest.mark.parametrize(("dtype", "holds"), [(torch.float32, False), (torch.bfloat16, False)])
def test_other_experts_are_found(dtype: torch.dtype, holds: bool) -> None:
    request = REQUESTS["routed experts, prompt 1"]
    name = request.request_id
    experts = [struct.pack("<4i", *row) for row in ((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3))]
    off = Answers({name: [7, 4, 3]}, states={name: [TokenStates(1, 3, b"", b"".join(experts))]})
    on = Answers({name: [7, 4, 3]}, states={name: [TokenStates(1, 1, b"", experts[0])]})
    assert compare_states({name: request}, off, on, dtype).missing == 2
    on.states[name].append(TokenStates(2, 2, b"", experts[1] + experts[1]))
    found = compare_states({name: request}, off, on, dtype)
    assert (found.missing, found.routed, found.rerouted, found.holds) == (0, 3, 1, holds)
    assert compare_states({name: request}, off, off, dtype).holds


def test_texts_are_cut_at_a_stop_string_however_the_tokens_arrive() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    tokens = tokenizer.encode("The capital of France is Paris.", add_special_tokens=False).ids
    stop = stop_text(tokenizer, tokens)
    off = Answers({"a": tokens}, parts={"a": [[token] for token in tokens]})
    on = Answers({"a": tokens}, parts={"a": [tokens[:4], tokens[4:]]})
    found = compare_texts(tokenizer, {"a": stop}, off, on)
    assert (found.compared, found.stopped, found.holds) == (2, 2, True)
    on.parts["a"] = [tokens[:2]]
    assert compare_texts(tokenizer, {"a": stop}, off, on).different == ["a"]


def test_every_request_option_is_compared_or_has_a_reason() -> None:
    names = {one.name for one in REQUEST_OPTIONS}
    assert names == {*COVERED, *NOT_COMPARED}
    assert not COVERED.keys() & NOT_COMPARED.keys()
    assert {case for cases in COVERED.values() for case in cases} <= set(OPTIONS)
    kinds = {option.constraint.kind for option in OPTIONS.values() if option.constraint is not None}
    assert kinds == set(ConstraintKind)


def test_a_pair_without_a_draft_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["verify", "--target", str(DEMO / "target"), "--device", "cpu"])
    assert isinstance(result.exception, ConfigurationError)
    assert "Give a draft with --draft" in str(result.exception)


def test_every_sampling_parameter_is_among_the_options() -> None:
    defaults = SamplingParams(temperature=0.0)
    for parameter in fields(SamplingParams):
        values = {getattr(option.sampling, parameter.name) for option in OPTIONS.values()}
        assert values - {getattr(defaults, parameter.name)}, f"no option sets {parameter.name}"


def test_every_mode_of_speculation_is_compared() -> None:
    speculations = [one for run in ways(DraftShape(5, 4, 16)).values() for one in run]
    assert {one.mode for one in speculations} == set(SpeculationMode)
    assert {one.shape.topk for one in speculations if one.mode is SpeculationMode.ON} == {1, 4}


def test_chi_square_tells_the_law_from_another() -> None:
    expected = [40.0, 30.0, 20.0, 4.0, 3.0]
    right, cells = chi_square(expected, [44, 27, 19, 3, 4])
    assert cells == 4, "the two rare outcomes are one cell"
    assert right == pytest.approx(0.8614, abs=1e-4)
    assert chi_square(expected, [20, 50, 20, 4, 3])[0] < 1e-4
    assert chi_square([100.0], [100.0]) == (1.0, 1)


def test_logprobs_are_compared_by_rank_up_to_the_first_different_token() -> None:
    request = REQUESTS["logprobs, prompt 1"]
    name = request.request_id
    near = [TokenLogprob(-1.0, [7, 8], [-1.0, -1.0]), TokenLogprob(-2.0), TokenLogprob(-3.0)]
    swapped = [TokenLogprob(-1.0, [8, 7], [-1.0, -1.0]), TokenLogprob(-2.25), TokenLogprob(-9.0)]
    off = Answers({name: [7, 4, 3]}, {name: near}, {name: [TokenLogprob(-math.inf)]})
    on = Answers({name: [7, 4, 2]}, {name: swapped}, {name: [TokenLogprob(-math.inf)]})
    found = compare_logprobs({name: request}, off, on, 0.2)
    assert (found.compared, found.largest, found.request, found.holds) == (5, 0.25, name, False)
    on.logprobs[name][1] = TokenLogprob(math.nan)
    assert compare_logprobs({name: request}, off, on, 0.2).largest == math.inf
