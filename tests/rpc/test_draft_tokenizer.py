"""A draft whose tokenizer differs from the target's is refused at start-up, in process and over Hello."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.services.draft.app import DraftService
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.app import Target
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import CheckpointError, OutriderError
from outrider.shared.nn.checkpoint.tokenizer_file import tokenizer_fingerprint
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
CPU = torch.device("cpu")
TOKENS = {"a": 0, "b": 1, "c": 2}
OTHERS = {"a": 0, "b": 2, "c": 1}


def with_tokenizer(folder: Path, to: Path, tokens: dict[str, int] | None, **layout: object) -> Path:
    shutil.copytree(folder, to)
    if tokens is not None:
        (to / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": tokens}, "added_tokens": []}, **layout)
        )  # type: ignore[arg-type]
    return to


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("bare")
    target = make_toy_target(folder / "target")
    return target, make_toy_eagle3(folder / "head", target)


@pytest.fixture
def target(bare: tuple[Path, Path], tmp_path: Path) -> Path:
    return with_tokenizer(bare[0], tmp_path / "target", TOKENS)


def head(bare: tuple[Path, Path], tmp_path: Path, tokens: dict[str, int] | None) -> Path:
    return with_tokenizer(bare[1], tmp_path / "head", tokens, indent=3)


def settings(draft: Path, **more: object) -> DraftSettings:
    return DraftSettings.load({"draft": draft, "device": "cpu", "kv_tokens": 4096, **more})


def test_the_fingerprint_depends_on_the_tokens_and_not_on_the_file(
    bare: tuple[Path, Path], target: Path, tmp_path: Path
) -> None:
    same = head(bare, tmp_path, dict(reversed(TOKENS.items())))
    assert (same / "tokenizer.json").read_bytes() != (target / "tokenizer.json").read_bytes()
    assert tokenizer_fingerprint(same) == tokenizer_fingerprint(target) != ""
    assert tokenizer_fingerprint(bare[0]) == ""
    assert tokenizer_fingerprint(
        with_tokenizer(bare[1], tmp_path / "other", OTHERS)
    ) != tokenizer_fingerprint(target)


def test_a_head_in_the_targets_process_is_refused(
    bare: tuple[Path, Path], target: Path, tmp_path: Path
) -> None:
    decoder = load_decoder(target, CPU, torch.float32)
    with pytest.raises(CheckpointError, match=r"different tokenizers.*'b' is id 2 .* and id 1") as caught:
        drafter_beside(decoder, settings(head(bare, tmp_path, OTHERS), target_weights=target))
    assert caught.value.field == "tokenizer"


def test_a_service_with_the_targets_folder_refuses_before_it_listens(
    bare: tuple[Path, Path], target: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="different tokenizers") as caught:
        DraftService(
            settings(
                head(bare, tmp_path, OTHERS), target_weights=target, listen=f"unix:{tmp_path}/draft.sock"
            )
        )
    assert caught.value.field == "tokenizer"


@pytest.fixture
def service(
    request: pytest.FixtureRequest, bare: tuple[Path, Path], tmp_path: Path
) -> Iterator[DraftService]:
    """A draft that learns about its target only from Hello."""
    running = DraftService(
        settings(head(bare, tmp_path, request.param), listen=f"unix:{tmp_path}/draft.sock")
    )
    running.start()
    yield running
    running.stop()


@pytest.mark.parametrize("service", [OTHERS], indirect=True)
def test_a_remote_target_with_another_tokenizer_refuses_to_start(service: DraftService, target: Path) -> None:
    serving = Target(
        TargetSettings.load({"model": target, "draft": service.address, "device": "cpu", "kv_tokens": 4096})
    )
    try:
        with pytest.raises(OutriderError, match="different tokenizers") as caught:
            asyncio.run(serving.wait_for_draft(20.0))
        assert caught.value.field == "tokenizer"
    finally:
        serving.shutdown()


@pytest.mark.parametrize("service", [TOKENS, None], indirect=True)
def test_the_same_tokenizer_or_none_is_accepted(service: DraftService, target: Path) -> None:
    serving = Target(
        TargetSettings.load({"model": target, "draft": service.address, "device": "cpu", "kv_tokens": 4096})
    )
    try:
        asyncio.run(serving.wait_for_draft(20.0))
        assert serving.drafter.state() is DrafterState.ON
    finally:
        serving.shutdown()
