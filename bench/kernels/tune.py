"""`outrider bench kernels --tune`: tries tiles for the matrix products of a model, and saves the fastest.

A tile is one way to divide a matrix product among a GPU's programs. The services also try tiles when they
start, but only for a limited time. This command has no time limit. Later starts of the services read the
saved tiles (`shared.nn.fused.trial`).
"""

from __future__ import annotations

import math

from outrider.bench.kernels.case import KernelOptions
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.bench.stacks.random_fit import check_shape_fits
from outrider.kernels.skinny_gemm.kept import Tried
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.dummy import random_decoder
from outrider.shared.nn.fused.trial import describe_tile, try_products
from outrider.shared.obs.progress import Progress


def tune_tiles(options: KernelOptions) -> int:
    """Try tiles for matrix products without a measured tile, save the fastest, and return the exit code.

    Raises:
        ConfigurationError: There is no GPU, the model shape does not use fused kernels, or its weights do
            not fit into the memory.
    """
    if options.device.type != "cuda":
        raise ConfigurationError("--tune measures tiles of GPU kernels; use --device cuda.", field="--tune")
    check_shape_fits(options.shape, options.device, options.dtype, with_head=False)
    decoder = random_decoder(options.shape.model_config(), options.device, options.dtype)
    if decoder.fused is None:
        raise ConfigurationError(
            f"--tune: {options.shape.name} does not use fused kernels, and only these have tiles.",
            field="--tune",
        )
    with _Steps() as steps:
        tried = try_products(decoder.fused.uses(), options.device, math.inf, tell=steps.tell)
    dtype = str(options.dtype).removeprefix("torch.")
    settings = {"shape": options.shape.name, "device": str(options.device), "dtype": dtype}
    result = Result("tiles", settings, [_row(entry) for entry in tried])
    return show_and_save(result, options.output, ("tile", "rule", "library"))


class _Steps:
    """Shows one progress bar for each step of a trial. Use it as a context manager."""

    def __init__(self) -> None:
        self._step = ""
        self._progress: Progress | None = None

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def tell(self, step: str, done: int, total: int) -> None:
        """Show how many parts of a step are done."""
        if step != self._step or self._progress is None:
            self._end()
            # A thread that redraws the bar would disturb the measurement.
            self._step, self._progress = step, Progress(step, still=True).__enter__()
        self._progress.tell(done, total)

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.__exit__(None, None, None)


def _row(tried: Tried) -> Row:
    product = tried.product
    case = (
        f"{product.epilogue.name.lower()} {product.out_features}x{product.in_features}, {product.rows} rows"
    )
    return Row(
        case,
        tried.microseconds,
        "us",
        more={"tile": describe_tile(tried.tile), "rule": tried.rule, "library": tried.library},
    )
