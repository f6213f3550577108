"""Model names from cache folders, and links of a snapshot whose destination is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.services.stack.launch import check_options, free_port
from outrider.services.stack.options import StackOptions
from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.base.model_paths import model_name, model_path
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.json_config import read_json


def test_a_snapshot_is_named_as_on_the_hub(tmp_path: Path) -> None:
    assert model_name(tmp_path / "models--org--a-b.c" / "snapshots" / "0123abcd") == "org/a-b.c"
    assert model_name(tmp_path / "llama-8b") == "llama-8b"
    assert model_name(tmp_path / "snapshots" / "0123abcd") == "0123abcd"


def test_the_path_of_a_model_is_its_folder_or_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_path(tmp_path / "models--org--a-b.c" / "snapshots" / "0123abcd") == "org/a-b.c"
    monkeypatch.chdir(tmp_path)
    assert model_path(Path("llama-8b")) == str(tmp_path / "llama-8b")


def test_a_dangling_link_is_named_with_its_destination(tmp_path: Path) -> None:
    """As in a container that mounts only the folder of the snapshot."""
    (tmp_path / "config.json").symlink_to("../../blobs/123")
    (tmp_path / "model.safetensors").symlink_to("../../blobs/456")
    named = r"config.json is a link to \.\./\.\./blobs/123, .*whole cache"
    with pytest.raises(ConfigurationError, match=f"^--target .*{named}"):
        check_options(StackOptions(target=tmp_path, draft=None, device="cpu", port=free_port()))
    with pytest.raises(CheckpointError, match=named):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors is a link to .*blobs/456"):
        CheckpointReader(tmp_path)
