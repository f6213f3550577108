"""`outrider doctor`: the findings and exit codes of whole pairs, the memory plan, and the probe."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.toys import make_toy_eagle3, make_toy_target
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.doctor.finding import Severity
from outrider.services.doctor.memory import check_memory, estimate_memory, table_bytes
from outrider.services.doctor.pair import Pair
from outrider.services.doctor.probe import Measured, judge_probe, run_probe
from outrider.services.draft.algorithm import Algorithm
from outrider.services.draft.heads.files.eagle3_config import AUX_KEY, Eagle3Config
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.memory_plan import DraftCache, Memory, more_tokens
from outrider.services.target.startup.memory_plan import plan_memory as plan_of_start
from outrider.shared.spec.tree import DraftShape

torch.set_num_threads(1)
RUNNER = CliRunner()
ROOT = Path(__file__).parents[4]
DEMO = ROOT / "models" / "demo"
VOCAB, HIDDEN = 40, 64
QUIET = 50
"""From this dimension on, `planted_pair` carries zeros up to its first aux layer, and noise after it."""


def doctor(target: Path, draft: Path | None, *more: str) -> tuple[int, dict[str, Any]]:
    arguments = ["doctor", "--target", str(target), "--device", "cpu", "--json", *more]
    result = RUNNER.invoke(cli.app, arguments + (["--draft", str(draft)] if draft else []))
    assert result.stdout, result.exception
    return result.exit_code, json.loads(result.stdout)


def lines(report: dict[str, Any], field: str, severity: str = "") -> list[str]:
    found = [one for one in report["findings"] if one["field"] == field and severity in ("", one["severity"])]
    return [f"{one['message']} {one['fix']}" for one in found]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, hidden_size=HIDDEN)


def edit(folder: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))
    save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors")


# ---- the report


def test_the_embedded_pair_has_no_warning() -> None:
    code, report = doctor(DEMO / "target", DEMO / "eagle3")
    assert code == 0
    assert report["verdict"] == "ok"
    assert [one for one in report["findings"] if one["severity"] != "ok"] == []
    assert "2048 of 4096" in lines(report, "d2t")[0]


def test_a_target_alone_is_examined_too(target: Path) -> None:
    code, report = doctor(target, None)
    assert code == 0
    assert lines(report, "d2t") == []
    assert "outrider convert tokenizer" in lines(report, str(target / "tokenizer.json"), "warning")[0]


def test_an_untrained_head_is_warned_about_with_evidence(tmp_path: Path, target: Path) -> None:
    head = make_toy_eagle3(tmp_path / "head", target)
    norms = {
        name: torch.ones_like(tensor)
        for name, tensor in load_file(head / "model.safetensors").items()
        if "norm" in name
    }
    edit(head, **norms)
    code, report = doctor(target, head)
    assert code == 0
    assert report["verdict"] == "warning"
    warnings = [one["message"] for one in report["findings"] if one["severity"] == "warning"]
    assert any("norm weights of the head are exactly 1" in message for message in warnings)
    assert any("look freshly initialised" in message and "normal, std" in message for message in warnings)


def test_a_projection_that_was_never_filled_is_named(tmp_path: Path, target: Path) -> None:
    head = make_toy_eagle3(tmp_path / "head", target)
    name = "midlayer.self_attn.o_proj.weight"
    edit(head, **{name: torch.zeros(HIDDEN, 64)})
    _, report = doctor(target, head)
    assert "never filled" in lines(report, name, "warning")[0]


def test_an_embedding_that_is_not_the_targets_is_warned_about(tmp_path: Path, target: Path) -> None:
    name = "embed_tokens.weight"
    copied = make_toy_eagle3(tmp_path / "copied", target, own_embedding=True)
    assert "equals the target's" in lines(doctor(target, copied)[1], name, "ok")[0]
    edit(copied, **{name: torch.randn(VOCAB, HIDDEN)})
    assert "mean cosine" in lines(doctor(target, copied)[1], name, "warning")[0]


@pytest.mark.parametrize(
    ("field", "config"),
    [("vocab_size", {"vocab_size": VOCAB + 8}), ("target_hidden_size", {"target_hidden_size": 2 * HIDDEN})],
)
def test_a_head_for_another_target_is_refused_with_both_numbers(
    tmp_path: Path, target: Path, field: str, config: dict[str, int]
) -> None:
    head = make_toy_eagle3(tmp_path / "head", target, config_overrides=config)
    code, report = doctor(target, head)
    assert code == 2
    (line,) = lines(report, field, "refused")[:1]
    assert str(config[field]) in line
    assert "another" in line


def test_aux_layers_are_reported_with_their_convention(tmp_path: Path, target: Path) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    implicit = make_toy_eagle3(tmp_path / "implicit", target, aux_layers=None)
    assert "[1, 3, 4]" in lines(doctor(target, implicit)[1], key, "ok")[0]
    inputs = make_toy_eagle3(tmp_path / "inputs", target, aux_layers=[2, 4, 8])
    assert "outputs of layers [1, 3, 7] are captured" in lines(doctor(target, inputs)[1], key, "warning")[0]
    config = json.loads((inputs / "config.json").read_text())
    config["eagle_config"][key] = [0, 2, 4, 6]
    (inputs / "config.json").write_text(json.dumps(config | {"num_aux_hidden_states": 3}))
    _, report = doctor(target, inputs)
    assert (
        "lists 4 layers, [0, 2, 4, 6]. The number takes precedence: outputs of layers [0, 2, 4]"
        in lines(report, "num_aux_hidden_states", "warning")[0]
    )
    beyond = make_toy_eagle3(tmp_path / "beyond", target, aux_layers=[2, 4, 9])
    code, report = doctor(target, beyond)
    assert code == 2
    assert lines(report, key, "refused")


def test_a_rotary_base_missing_from_the_head_is_reported(tmp_path: Path) -> None:
    other = make_toy_target(tmp_path / "target", vocab_size=VOCAB, rope_theta=500000.0)
    head = make_toy_eagle3(tmp_path / "head", other)
    assert "10000 is used; the target has 500000" in lines(doctor(other, head)[1], "rope_theta")[0]


def test_memory_adds_up(target: Path, tmp_path: Path) -> None:
    head = make_toy_eagle3(tmp_path / "head", target)
    plan = estimate_memory(Pair(target, head, Algorithm.AUTO, torch.device("cpu"), torch.bfloat16))
    weights = load_file(target / "model.safetensors")
    assert plan.target_weights == sum(2 * tensor.numel() for tensor in weights.values())
    assert plan.target_kv_per_token == 2 * (
        2 * 8 * 2 * 16 + HIDDEN
    )  # K and V of 8 layers, 2 heads of 16, and a feature row
    assert plan.draft_kv_per_token == 2 * (2 * 2 * 16)
    assert plan.target_weights < plan.minimum <= plan.full_context


def test_a_drafts_table_on_a_gpu_is_counted(target: Path, tmp_path: Path) -> None:
    head = make_toy_eagle3(tmp_path / "head", target)
    config = Pair(target, head, Algorithm.AUTO, torch.device("cpu"), torch.bfloat16).head_config
    nbytes = VOCAB * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * 2
    free, total = 2 * nbytes, 50 * nbytes
    assert table_bytes(config, torch.bfloat16, free, total) == nbytes
    assert table_bytes(config, torch.bfloat16, free - 1, total) == 0
    assert table_bytes(config, torch.bfloat16, free, total - 1) == 0
    assert table_bytes(config, torch.float16, free, total) == 0


def test_a_pair_that_does_not_fit_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.services.doctor.memory.device_memory", lambda device: (1000, 2000))
    code, report = doctor(target, None)
    assert code == 2
    assert "at least" in lines(report, "device", "refused")[0]
    assert report["memory"]["available"] == 1000


def test_a_gpu_that_is_too_small_is_refused_as_by_the_target(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor reports the cache size and the refusal of the plan that the target makes at startup."""
    pair = Pair(
        target,
        make_toy_eagle3(tmp_path / "head", target),
        Algorithm.AUTO,
        torch.device("cuda"),
        torch.bfloat16,
    )
    monkeypatch.setattr("outrider.services.doctor.memory.device_memory", lambda device: (4 << 30, 5 << 30))
    plan = estimate_memory(pair)
    settings = TargetSettings.load({"model": target, "device": "cuda", "max_running_requests": 256})
    weights = plan.target_weights + plan.draft_weights
    memory = Memory(5 << 30, (4 << 30) - weights, plan.target_weights, plan.draft_weights)
    draft = DraftCache(plan.draft_kv_per_token, more_tokens(settings))
    start = plan_of_start(settings, plan.target_kv_per_token, plan.context, memory, plan.reserve, draft)
    assert plan.kv_tokens == start.pages * start.page_size > plan.least_tokens
    assert [finding.severity for finding in check_memory(pair)] == [Severity.OK, Severity.OK]

    fits = plan.minimum
    monkeypatch.setattr("outrider.services.doctor.memory.device_memory", lambda device: (fits, 100 * fits))
    assert estimate_memory(pair).kv_tokens == 0
    refused = list(check_memory(pair))[-1]
    assert refused.severity is Severity.REFUSED, (
        "the memory is free, but --mem-fraction-static does not allow its use"
    )
    assert "mem_fraction_static: no room is left for the K/V cache" in refused.fix


def test_the_table_ends_with_a_verdict(target: Path) -> None:
    result = RUNNER.invoke(cli.app, ["doctor", "--target", str(target), "--device", "cpu"])
    assert result.exit_code == 0
    assert "This pair can be served, but read the warnings." in result.stdout
    assert "→ Make it with" in result.stdout


# ---- the probe


@pytest.fixture(scope="module")
def planted_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a pair that agrees often. Its head reads noise if its first aux layer is shifted up by one."""
    folder = tmp_path_factory.mktemp("planted")
    target = make_toy_target(folder / "target", vocab_size=VOCAB, hidden_size=HIDDEN, planted=3.0)
    noise = torch.Generator().manual_seed(5)
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[QUIET:] = 0
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor[:, QUIET:] = 0
    weights["model.layers.2.mlp.down_proj.weight"][QUIET:] = 20 * torch.randn(
        HIDDEN - QUIET, 96, generator=noise
    )
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    head = make_toy_eagle3(folder / "head", target, draft_vocab_size=VOCAB, planted=3.0)
    fc = load_file(head / "model.safetensors")["fc.weight"]
    for chunk in range(3):
        fc[:, chunk * HIDDEN + QUIET : (chunk + 1) * HIDDEN] = 0
    fc[:, QUIET:HIDDEN] = torch.randn(HIDDEN, HIDDEN - QUIET, generator=noise)
    edit(head, **{"fc.weight": fc})
    return target, head


PROBE = ("--probe", "--num-prompts", "4", "--tokens", "24")


def test_a_probe_measures_and_keeps_the_right_aux_layers(planted_pair: tuple[Path, Path]) -> None:
    code, report = doctor(*planted_pair, *PROBE)
    assert code == 0
    configured, *others = report["probe"]["runs"]
    assert configured["aux_layer_ids"] == [1, 3, 4]
    assert [one["aux_layer_ids"] for one in others] == [[0, 2, 3], [2, 4, 5]]
    assert configured["accept_length"] > 2
    assert configured["tokens"] == 4 * 24
    assert others[1]["accept_length"] < configured["accept_length"] / 1.2
    line = lines(report, "eagle_aux_hidden_state_layer_ids", "ok")[-1]
    for run in (configured, *others):
        assert (
            f"{run['accept_length']:.2f} {'as configured' if run is configured else 'with ' + run['variant']}"
            in line
        )
    assert "no alternative is more than 3% better" in line


def test_a_probe_names_the_aux_layers_that_are_better(
    planted_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, head = planted_pair
    shifted = tmp_path / "head"
    shifted.mkdir()
    save_file(load_file(head / "model.safetensors"), shifted / "model.safetensors")
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    (shifted / "config.json").write_text(json.dumps(config))
    code, report = doctor(target, shifted, *PROBE)
    assert code == 0
    (line,) = lines(report, "eagle_aux_hidden_state_layer_ids", "warning")
    assert "you lose" in line
    assert '"eagle_aux_hidden_state_layer_ids": [1, 3, 4]' in line


def test_a_probe_names_layers_as_the_targets_family_counts_them(planted_pair: tuple[Path, Path]) -> None:
    """DeepSeek's ids count inputs unless the first is 1. The advised ids must mean the measured layers."""
    pair = Pair(*planted_pair, Algorithm.AUTO, torch.device("cpu"), torch.float32)
    pair.target_info = dataclasses.replace(pair.target_info, model_type="deepseek_v3")
    runs = run_probe(pair, [(1, 2, 3)], 4, DraftShape(2, 1, 3))
    named = {run.aux_layer_ids: run.named_ids for run in runs}
    assert named == {(1, 3, 4): (1, 3, 4), (0, 2, 3): None, (2, 4, 5): (3, 5, 6)}
    for outputs, ids in named.items():
        if ids is not None:
            written = Eagle3Config.parse({**pair.draft_raw, "eagle_config": {AUX_KEY: list(ids)}})
            assert written.check_target(pair.target_info) == outputs


@pytest.mark.parametrize(
    ("named_ids", "advice"), [((3, 5, 6), f'"{AUX_KEY}": [3, 5, 6]'), (None, "cannot express these layers")]
)
def test_a_probe_advises_ids_that_a_file_can_express(named_ids: tuple[int, ...] | None, advice: str) -> None:
    runs = [
        Measured("as configured", (1, 3, 4), (1, 3, 4), 2.0, 9, 18, 1.0),
        Measured("aux layers +1", (2, 4, 5), named_ids, 3.0, 6, 18, 1.0),
    ]
    (finding,) = [finding for finding in judge_probe(runs) if finding.severity is Severity.WARNING]
    assert "layers [1, 3, 4] have accept length 2.00, those of [2, 4, 5] have 3.00" in finding.message
    assert advice in finding.fix


def test_a_probe_warns_about_a_head_that_guesses_nothing(target: Path, tmp_path: Path) -> None:
    head = make_toy_eagle3(tmp_path / "head", target, draft_vocab_size=VOCAB)
    _, report = doctor(target, head, "--probe", "--num-prompts", "2", "--tokens", "8")
    assert "untrained" in lines(report, "accept_length", "warning")[0]


def test_a_probe_takes_prompts_of_token_ids_and_refuses_others_by_line(
    planted_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4, 5]}\n')
    _, report = doctor(*planted_pair, *PROBE, "--prompts", str(prompts))
    assert report["probe"]["runs"][0]["tokens"] == 2 * 24
    prompts.write_text('{"prompt_ids": [1, 99]}\n')
    code, report = doctor(*planted_pair, *PROBE, "--prompts", str(prompts))
    assert code == 2
    assert (
        f"{prompts}:1: prompt_ids must list token ids below {VOCAB}"
        in lines(report, "--prompts", "refused")[0]
    )


def test_a_refused_pair_is_not_probed(tmp_path: Path, target: Path) -> None:
    head = make_toy_eagle3(tmp_path / "head", target, drop=("norm.weight",))
    code, report = doctor(target, head, *PROBE)
    assert code == 2
    assert "probe" not in report
    assert "not run" in lines(report, "--probe")[0]


def test_a_token_map_is_checked_and_used(planted_pair: tuple[Path, Path], tmp_path: Path) -> None:
    ids = tmp_path / "map.json"
    ids.write_text(json.dumps(list(range(30))))
    _, report = doctor(*planted_pair, *PROBE, "--speculative-token-map", str(ids))
    whole = doctor(*planted_pair, *PROBE)[1]["probe"]["runs"][0]["accept_length"]
    assert 1 < report["probe"]["runs"][0]["accept_length"] < whole, "ten of forty tokens cannot be drafted"
    ids.write_text(json.dumps([VOCAB]))
    code, report = doctor(*planted_pair, "--speculative-token-map", str(ids))
    assert code == 2
    assert f"contains the id {VOCAB}" in lines(report, "speculative_token_map", "refused")[0]


def test_other_ways_of_drafting_are_probed_too(target: Path) -> None:
    _, report = doctor(
        target, None, "--speculative-algorithm", "ngram", "--probe", "--num-prompts", "1", "--tokens", "8"
    )
    assert len(report["probe"]["runs"]) == 1
    _, report = doctor(
        target,
        target,
        "--speculative-algorithm",
        "standalone",
        "--probe",
        "--num-prompts",
        "2",
        "--tokens",
        "12",
    )
    assert report["probe"]["runs"][0]["accept_length"] > 3, "a model agrees with itself"


def test_an_unused_draft_is_refused(target: Path) -> None:
    code, report = doctor(target, target, "--speculative-algorithm", "none")
    assert code == 2
    assert f"--draft {target}" in lines(report, "speculative_algorithm", "refused")[0]
    assert doctor(target, None, "--speculative-algorithm", "none")[0] == 0


def test_invalid_flag_values_are_named() -> None:
    result = RUNNER.invoke(cli.app, ["doctor", "--target", "x", "--speculative-algorithm", "medusa"])
    assert "EAGLE3" in str(result.exception)
    result = RUNNER.invoke(cli.app, ["doctor", "--target", "x", "--dtype", "int4", "--device", "cpu"])
    assert "bfloat16" in str(result.exception)
