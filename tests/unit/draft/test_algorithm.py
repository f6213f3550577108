"""The choice of the drafting algorithm from flags and checkpoints, in the draft and in the launcher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.services.draft.algorithm import Algorithm, check_head, choose_algorithm, identify
from outrider.services.draft.settings import DraftSettings
from outrider.services.stack.launch import check_options, plan_stack
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.placement import place_draft
from outrider.shared.base.errors import CheckpointError, ConfigurationError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("folders")
    made = {
        "model": make_toy_target(
            base / "model", hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16
        )
    }
    made["eagle3"] = make_toy_eagle3(base / "eagle3", made["model"])
    for name, tensor in {
        "mimo": "model.mtp_layers.0.input_proj.weight",
        "nextn": "model.layers.61.eh_proj.weight",
        "eagle": "fc.weight",
        "gpt2": "transformer.h.0.mlp.c_fc.weight",
    }.items():
        (base / name).mkdir()
        save_file({tensor: torch.zeros(1, 1)}, str(base / name / "model.safetensors"))
        made[name] = base / name
    return made


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model", Algorithm.STANDALONE),
        ("gpt2", Algorithm.STANDALONE),
        ("eagle3", Algorithm.EAGLE),
        ("eagle", Algorithm.EAGLE),
        ("mimo", Algorithm.MTP),
        ("nextn", Algorithm.MTP),
    ],
)
def test_a_checkpoint_shows_what_it_is(folders: dict[str, Path], name: str, expected: Algorithm) -> None:
    assert identify(folders[name]) is expected
    assert choose_algorithm(Algorithm.AUTO, folders[name], None).algorithm is expected


@pytest.mark.parametrize("asked", [Algorithm.AUTO, Algorithm.EAGLE, Algorithm.MTP, Algorithm.NEXTN])
def test_without_a_draft_the_targets_own_layers_are_meant(folders: dict[str, Path], asked: Algorithm) -> None:
    choice = choose_algorithm(asked, None, folders["mimo"])
    assert (choice.algorithm, choice.folder) == (Algorithm.MTP, folders["mimo"])
    with pytest.raises(ConfigurationError, match="no MTP layers"):
        choose_algorithm(asked, None, folders["model"])
    with pytest.raises(ConfigurationError, match="--target-weights"):
        choose_algorithm(asked, None, None)


def test_what_contradicts_itself_is_refused(folders: dict[str, Path]) -> None:
    for asked, draft, match in (
        (Algorithm.NONE, "eagle3", "NONE"),
        (Algorithm.NGRAM, "eagle3", "Remove --draft"),
        (Algorithm.STANDALONE, None, "small model"),
        (Algorithm.EAGLE3, None, "select MTP"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            choose_algorithm(asked, folders[draft] if draft else None, folders["model"])
    for asked, draft, match in (
        (Algorithm.STANDALONE, "eagle3", "draft head"),
        (Algorithm.EAGLE3, "model", "STANDALONE"),
        (Algorithm.EAGLE3, "mimo", "Set MTP"),
        (Algorithm.MTP, "model", "no MTP layers"),
        (Algorithm.NEXTN, "eagle3", "no MTP layers"),
    ):
        with pytest.raises(CheckpointError, match=match) as caught:
            choose_algorithm(asked, folders[draft], None)
        assert caught.value.field == "speculative_algorithm"


def test_the_kind_of_a_head_must_be_the_one_asked_for(folders: dict[str, Path]) -> None:
    check_head(choose_algorithm(Algorithm.AUTO, folders["eagle3"], None), "EAGLE3")
    check_head(choose_algorithm(Algorithm.EAGLE3, folders["eagle3"], None), "EAGLE3")
    with pytest.raises(CheckpointError, match="--speculative-algorithm EAGLE3"):
        check_head(choose_algorithm(Algorithm.EAGLE, folders["eagle3"], None), "EAGLE3")


def test_ngrams_read_no_folder(folders: dict[str, Path]) -> None:
    assert choose_algorithm(Algorithm.NGRAM, None, None).folder is None
    assert choose_algorithm(Algorithm.NGRAM, None, folders["model"]).folder is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [("eagle3", Algorithm.EAGLE3), ("NEXTN", Algorithm.NEXTN), ("Auto", Algorithm.AUTO)],
)
def test_settings_take_any_case(value: str, expected: Algorithm) -> None:
    assert (
        DraftSettings.load({"draft": "x", "speculative_algorithm": value}).speculative_algorithm is expected
    )


def test_settings_name_the_field() -> None:
    for values, field in (
        ({"draft": "x", "speculative_algorithm": "MAGIC"}, "speculative_algorithm"),
        ({"speculative_algorithm": "STANDALONE"}, "draft"),
        ({"speculative_algorithm": "NGRAM", "ngram_min_match": 5, "ngram_max_match": 3}, "ngram_min_match"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            DraftSettings.load(values).check()
        assert caught.value.field == field


def lines_of(options: StackOptions) -> dict[str, str]:
    plan = plan_stack(options, Path("/run/x"), place_draft(options, []).inproc)
    return {child.name: " ".join(child.command[1:]) for child in plan.children}


def test_a_stack_drafts_by_ngrams_in_the_targets_process() -> None:
    lines = lines_of(StackOptions(target=Path("/m/t"), draft=None, algorithm=Algorithm.NGRAM, device="cpu"))
    assert set(lines) == {"gateway", "target"}
    assert "--draft inproc: --speculative-algorithm NGRAM" in lines["target"]


def test_a_stack_drafts_by_the_targets_own_layers_in_a_service_of_its_own() -> None:
    lines = lines_of(StackOptions(target=Path("/m/t"), draft=None, algorithm=Algorithm.NEXTN, device="cpu"))
    assert (
        "serve draft --listen unix:/run/x/draft.sock --target-weights /m/t --speculative-algorithm NEXTN"
        in lines["draft"]
    )
    assert "--draft unix:/run/x/draft.sock --speculative-algorithm NEXTN" in lines["target"]


def test_a_target_is_not_told_that_eagle_must_be_a_head() -> None:
    """As in SGLang, EAGLE may turn out to be MTP layers.

    Only the draft reads the checkpoint. By the name alone, the target would refuse the MTP layers.
    """
    options = StackOptions(target=Path("/m/t"), draft=None, algorithm=Algorithm.EAGLE, device="cpu")
    lines = lines_of(options)
    assert "--speculative-algorithm EAGLE" in lines["draft"]
    assert "--speculative-algorithm" not in lines["target"]
    inproc = lines_of(replace(options, transport=Transport.INPROC))
    assert "--speculative-algorithm EAGLE" in inproc["target"], (
        "in process, the target builds the draft itself"
    )


def test_a_stack_without_anything_to_draft_with_decodes_plainly() -> None:
    for options in (
        StackOptions(target=Path("/m/t"), draft=None, device="cpu"),
        StackOptions(target=Path("/m/t"), draft=Path("/m/d"), algorithm=Algorithm.NONE, device="cpu"),
    ):
        lines = lines_of(options)
        assert set(lines) == {"gateway", "target"}
        assert "--draft none" in lines["target"]


def test_a_stack_with_contradicting_options_is_refused_before_it_starts(folders: dict[str, Path]) -> None:
    for options in (
        StackOptions(
            target=folders["model"], draft=None, algorithm=Algorithm.STANDALONE, skip_tokenizer=True
        ),
        StackOptions(
            target=folders["model"], draft=folders["eagle3"], algorithm=Algorithm.NGRAM, skip_tokenizer=True
        ),
    ):
        with pytest.raises(ConfigurationError) as caught:
            check_options(options)
        assert caught.value.field == "draft"
