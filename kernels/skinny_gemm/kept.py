"""Stores measured tiles on disk, so that a later start chooses the same tiles and rounds the same way.

A tile is one way to compute a matrix product. A trial measures several tiles of a product on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.kernels.skinny_gemm.table import STORED, Product, tile_of
from outrider.kernels.skinny_gemm.types import Epilogue, Tile

_RUN_BY_TRIALS = (
    "_fp8.py",
    "_launch.py",
    "add_norm",
    "quantize_rows",
    "rope_store",
    "silu_mul",
    "skinny_gemm",
    "stream.py",
)
"""Files and folders, relative to the folder `kernels`, with code that a trial of tiles runs: the products
themselves and the kernels that read or write their data."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of a trial, which measures several tiles of a matrix product.

    Attributes:
        product: Product that was measured.
        tile: Tile to use for the product.
        microseconds: Time of a launch with that tile, in microseconds.
        rule: Time of a launch with the tile of `guess_tile`, in microseconds. None if that tile was not
            measured.
        library: Time of a launch by torch's library, in microseconds. None if the library was not measured.
    """

    product: Product
    tile: Tile
    microseconds: float
    rule: float | None = None
    library: float | None = None

    def to_json(self) -> dict[str, object]:
        """Return a JSON object that `from_json` can read."""
        product, tile = self.product, self.tile
        return {
            "product": [
                product.epilogue.name, product.out_features, product.in_features, product.rows,
                _name(product.dtype),
            ],
            "tile": [
                tile.method.value, tile.block_n, tile.block_k, tile.splits, tile.warps, tile.stages,
                tile.block_m, tile.overlap.value, tile.programs,
            ],
            "microseconds": self.microseconds, "rule": self.rule, "library": self.library,
        }  # fmt: skip

    @classmethod
    def from_json(cls, raw: dict[str, object]) -> Tried:
        """Read a result from a JSON object.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: The object does not describe a result.
        """
        product, tile = raw["product"], raw["tile"]
        if not isinstance(product, list) or not isinstance(tile, list):
            raise TypeError("'product' and 'tile' must be lists")
        epilogue, out_features, in_features, rows, dtype = product
        microseconds, rule, library = (raw[name] for name in ("microseconds", "rule", "library"))
        if not isinstance(microseconds, float):
            raise TypeError("'microseconds' must be a float")
        rule, library = (time if isinstance(time, float) else None for time in (rule, library))
        of = Product(
            Epilogue[epilogue], int(out_features), int(in_features), int(rows), getattr(torch, dtype)
        )
        return cls(of, tile_of(tile), microseconds, rule, library)


def tiles_file(device: str) -> Path:
    """Return the path of the file with the measured tiles of a kind of device.

    The file is in the folder of Triton's cache. Its name depends on the kernels' sources (`sources`) and on
    the versions of Triton, torch and CUDA. Results of other versions are therefore not used.

    Example:
        >>> from outrider.kernels.skinny_gemm.kept import tiles_file
        >>> path = tiles_file("NVIDIA H200")
        >>> path.parent.name, path.name[:12], path.suffix
        ('outrider-tiles', 'nvidia-h200-', '.json')
    """
    import triton
    from triton import knobs

    digest = hashlib.sha256(f"{triton.__version__} {torch.__version__} {torch.version.cuda}".encode())
    for source in sources():
        digest.update(source.read_bytes())
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return Path(knobs.cache.dir) / "outrider-tiles" / f"{name}-{digest.hexdigest()[:16]}.json"


def sources() -> list[Path]:
    """Return the files that decide the result of a trial, including the tiles of this package."""
    folder = Path(__file__).parents[1]
    parts = [folder / name for name in _RUN_BY_TRIALS]
    files = [found for part in parts for found in (part.rglob("*.py") if part.is_dir() else (part,))]
    return [*sorted(files), *(Path(__file__).with_name(name) for name in sorted(STORED.values()))]


def read_tiles(path: Path) -> list[Tried]:
    """Return the results stored in a file; an empty list if the file is missing or has another format.

    Example:
        >>> from pathlib import Path
        >>> from outrider.kernels.skinny_gemm.kept import read_tiles
        >>> read_tiles(Path("missing.json"))
        []
    """
    try:
        return [Tried.from_json(entry) for entry in json.loads(path.read_text())["tiles"]]
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return []


@contextlib.contextmanager
def trying_alone(path: Path) -> Iterator[bool]:
    """Keep other processes from measuring tiles for the same file of results (a context manager).

    Concurrent measurements would slow each other down.

    Yields:
        True if this process may measure, or False if another process is measuring. If the lock file cannot be
        written, the result is always True. In this case, processes do not exclude each other, and results
        cannot be stored.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from outrider.kernels.skinny_gemm.kept import trying_alone
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "tiles.json"
        ...     with trying_alone(path) as first, trying_alone(path) as second:
        ...         print(first, second)
        True False
    """
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(
                held.enter_context(path.with_suffix(".trial").open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB
            )
            alone = True
        except BlockingIOError:
            alone = False
        except OSError:
            alone = True
        yield alone


def keep_tiles(path: Path, tried: Sequence[Tried], device: str) -> list[Tried]:
    """Add results of trials to a file of measured tiles, and return the file's results for these products.

    If several processes measure the same product, all of them use the tile that is stored first.

    Raises:
        OSError: The file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from outrider.kernels.skinny_gemm import Epilogue, Method, Tile
        >>> from outrider.kernels.skinny_gemm.kept import Tried, keep_tiles
        >>> from outrider.kernels.skinny_gemm.table import Product
        >>> product = Product(Epilogue.PLAIN, out_features=48, in_features=32, rows=1, dtype=torch.bfloat16)
        >>> first, second = (Tried(product, Tile(Method.SUM, 4), time) for time in (2.5, 1.5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "tiles.json"
        ...     kept = [keep_tiles(path, [tried], "a GPU")[0].microseconds for tried in (first, second)]
        >>> kept
        [2.5, 2.5]
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {entry.product: entry for entry in read_tiles(path)}
        for entry in tried:
            kept.setdefault(entry.product, entry)
        fresh = path.with_suffix(f".{os.getpid()}")
        body = ",\n".join(json.dumps(entry.to_json()) for entry in kept.values())
        fresh.write_text(f'{{"device": {json.dumps(device)}, "tiles": [\n{body}\n]}}\n')
        fresh.replace(path)  # atomic, because readers take no lock
    return [kept[entry.product] for entry in tried]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
