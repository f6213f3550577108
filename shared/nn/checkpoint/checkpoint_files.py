"""Finds and opens the tensor files of a model folder: a single file, or shards that an index file lists."""

from __future__ import annotations

from pathlib import Path

from outrider.shared.base.errors import CheckpointError
from outrider.shared.base.model_paths import dangling_links
from outrider.shared.nn.checkpoint.json_config import read_json
from outrider.shared.nn.checkpoint.tensor_file import TensorFile, open_tensor_file

LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""Pairs of names, in search order: an index file, and the single file that a folder has instead."""


class CheckpointFiles:
    """The open tensor files of a model's checkpoint.

    Args:
        path: A tensor file or a model folder (see `CheckpointReader`).

    Attributes:
        files: The files, in order of their names.
        file_of: Maps a tensor name to the file that contains the tensor.

    Raises:
        CheckpointError: A file is missing, truncated or corrupt, or the shards do not match their index.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files: list[TensorFile] = []
        self.file_of: dict[str, TensorFile] = {}
        try:
            self._open()
        except CheckpointError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the files."""
        for file in self.files:
            file.close()
        self.files = []
        self.file_of = {}

    def _open(self) -> None:
        if self._path.is_file():
            self._add_file(self._path)
            return
        if not self._path.is_dir():
            raise CheckpointError(
                f"{self._path} does not exist; pass the path of a Hugging Face model folder.",
                field=str(self._path),
            )
        for index_name, single_name in LAYOUTS:
            if (self._path / index_name).is_file():
                self._open_shards(self._path / index_name)
                return
            if (self._path / single_name).is_file():
                self._add_file(self._path / single_name)
                return
        if link := dangling_links(self._path):
            raise CheckpointError(link, field=str(self._path))
        candidates = sorted(self._path.glob("*.safetensors"))
        if len(candidates) != 1:
            found = (
                f"{len(candidates)} safetensors files without model.safetensors.index.json"
                if candidates
                else "no weights"
            )
            raise CheckpointError(
                f"{self._path} contains {found}; it must contain model.safetensors, an index with its "
                "shards, or pytorch_model.bin.",
                field=str(self._path),
            )
        self._add_file(candidates[0])

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(
                f"{index} has no weight_map from tensor names to file names; download it again.",
                field=str(index),
            )
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise CheckpointError(
                    f"{index} points to {shard!r}, outside the model folder; download the index again.",
                    field=str(index),
                )
            self._add_file(self._path / shard)
        for name, shard in weight_map.items():
            if name not in self.file_of or self.file_of[name].path.name != shard:
                raise CheckpointError(
                    f"{index} lists {name} under {shard}, but that file does not contain it; "
                    "download both files again.",
                    field=name,
                )

    def _add_file(self, path: Path) -> None:
        file = open_tensor_file(path)
        self.files.append(file)
        for name in file.tensors:
            if name in self.file_of:
                raise CheckpointError(
                    f"{name} is in {self.file_of[name].path} and in {path}; remove the wrong shard.",
                    field=name,
                )
            self.file_of[name] = file
