"""Models named `ORG/NAME`: found in the Hugging Face cache or downloaded, with a small hub in a thread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.services.hub_server import Hub, HubRepository, running_hub

from outrider.services.hub.model_folder import is_hub_name, model_folder
from outrider.services.hub.snapshot import missing_file, wanted_files
from outrider.shared.base.errors import ConfigurationError, UnavailableError

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights" * 100,
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"pickled",
    "README.md": b"# Model",
    "modeling_remote.py": b"raise SystemExit",
    "onnx/config.json": b"{}",
}
SERVED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        hub.repositories["org/model"] = HubRepository(dict(FILES))
        yield hub


@pytest.fixture
def get(hub: Hub, tmp_path: Path) -> Callable[..., Path]:
    def get(name: str = "org/model", revision: str | None = None) -> Path:
        return model_folder(name, "--target", revision, cache=tmp_path / "cache", endpoint=hub.url)

    return get


def test_a_model_is_downloaded_once_and_then_found_in_the_cache(hub: Hub, get: Callable[..., Path]) -> None:
    folder = get()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in SERVED
    }
    assert set(hub.downloaded) == SERVED, "no code, no pickle, no copies of the weights"
    assert hub.downloaded[-1] == "model.safetensors", "complete weights must imply a complete snapshot"
    asked = hub.requests
    assert get() == folder
    assert hub.requests == asked, "a cached model needs no network"


def test_a_revision_selects_its_own_snapshot(hub: Hub, get: Callable[..., Path]) -> None:
    first = get()
    repository = hub.repositories["org/model"]
    repository.branches = ("main", "v2")
    repository.files["config.json"] = b'{"second": 1}'
    second = get(revision="v2")
    assert second != first
    assert (second / "config.json").read_bytes() == b'{"second": 1}'
    assert get(revision=repository.commit) == second
    with pytest.raises(ConfigurationError, match="--target org/model: the repository has no revision v3"):
        get(revision="v3")


def test_a_missing_repository_is_named(get: Callable[..., Path]) -> None:
    with pytest.raises(ConfigurationError, match=r"no repository org/typo .*Check the spelling.*HF_TOKEN"):
        get("org/typo")


def test_a_gated_repository_needs_its_terms_and_a_token(
    hub: Hub, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/model"].token = "hf_secret"
    with pytest.raises(
        ConfigurationError, match=rf"is gated. Accept its terms at {hub.url}/org/model.*HF_TOKEN"
    ):
        get()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (get() / "model.safetensors").exists()


def test_a_broken_download_is_reported_and_continued(hub: Hub, get: Callable[..., Path]) -> None:
    repository = hub.repositories["org/model"]
    repository.cut.add("model.safetensors")
    with pytest.raises(UnavailableError, match=r"the download from .* failed: .*run the command again"):
        get()
    repository.cut.clear()
    hub.downloaded.clear()
    assert (get() / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert set(hub.downloaded) == {"model.safetensors"}


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"the download from http://127.0.0.1:9 failed.*HF_ENDPOINT"):
        model_folder("org/model", "--draft", cache=tmp_path, endpoint="http://127.0.0.1:9")


def test_a_repository_without_weights_that_we_read_is_refused(hub: Hub, get: Callable[..., Path]) -> None:
    hub.repositories["org/gguf"] = HubRepository({"model-Q4.gguf": b"x", "config.json": b"{}"})
    with pytest.raises(ConfigurationError, match="not GGUF"):
        get("org/gguf")


def test_a_snapshot_without_one_of_its_shards_is_completed(hub: Hub, get: Callable[..., Path]) -> None:
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = str({"weight_map": shards}).replace("'", '"').encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index}
    hub.repositories["org/sharded"] = HubRepository(
        files | {shard: b"w" + shard.encode() for shard in shards.values()}
    )
    folder = get("org/sharded")
    (folder / shards["b"]).resolve().unlink()
    assert missing_file(folder) == shards["b"], "a link whose blob is gone counts as missing"
    assert get("org/sharded") == folder
    assert missing_file(folder) == ""


@pytest.mark.parametrize(
    ("name", "hub_name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("org/model_2.x", True),
        ("/models/llama", False),
        ("./org/model", False),
        ("../model", False),
        ("llama", False),
        ("a/b/c", False),
        ("org/model/", False),
    ],
)
def test_which_names_are_names_on_a_hub(name: str, hub_name: bool) -> None:
    assert is_hub_name(name) is hub_name


def test_a_local_folder_goes_before_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("org/model", "--target") == Path("org/model")
    with pytest.raises(ConfigurationError, match="the revision v2 has no meaning"):
        model_folder("org/model", "--target", "v2")


def test_bin_files_are_only_taken_if_there_are_no_safetensors() -> None:
    names = ["config.json", "pytorch_model.bin", "training_args.bin", "optimizer.pt"]
    assert wanted_files(names) == (["config.json"], ["pytorch_model.bin"])
    assert wanted_files([*names, "model.safetensors"])[1] == ["model.safetensors"]
    assert wanted_files(["params.json", "consolidated.safetensors"])[1] == ["consolidated.safetensors"]


def test_the_command_line_reads_the_environment_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HOME count, a second start works offline, and offline errors say so."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = (
        "from outrider.services.hub.model_folder import model_folder as find\n"
        "import sys\n"
        "try: print(find(sys.argv[1], '--target'))\n"
        "except Exception as error: print(error)"
    )

    def run(name: str, **more: str) -> str:
        command = [sys.executable, "-c", code, name]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True).stdout.strip()

    folder = run("org/model")
    assert folder.startswith(str(tmp_path / "hub" / "models--org--model" / "snapshots"))
    assert run("org/model", HF_HUB_OFFLINE="1") == folder
    assert "HF_HUB_OFFLINE forbids a download" in run("org/other", HF_HUB_OFFLINE="1")
