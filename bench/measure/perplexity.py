"""`outrider bench perplexity`: measures perplexity on a text, with and without FP8 weights or FP8 KV cache.

Texts are cut into windows. Each window is read in one pass, with the KV pool and attention code of the
service. The first token of a window is not counted, because no token precedes it. The quantized and the
unquantized model read the same windows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from outrider.bench.report.record import Result, Row, show_and_save
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import AttentionKind, create_backend
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.nn.quantized import quantize_decoder
from outrider.shared.obs.progress import Progress

WIDE = "as it is"
"""Name of the row of the unquantized model. Its perplexity is the floor of the other rows."""
TEXT_FIELDS = ("text", "prompt", "question", "answer")


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    """Options of `outrider bench perplexity`: the text, the model and its quantization.

    Attributes:
        text: A text file or a JSON-lines file. In each line of a JSON-lines file, the fields in `TEXT_FIELDS`
            are joined.
        target: Model folder with a tokenizer.json.
        device, dtype: Device and dtype of the model.
        quantization: ``none`` or ``fp8``.
        kv_cache_dtype: ``auto`` or ``fp8_e4m3``.
        tokens: Maximum number of tokens to count.
        window: Number of tokens per pass.
        output: JSON file or folder to write to. With None, the folder is bench-results.
    """

    text: Path
    target: Path
    device: torch.device
    dtype: torch.dtype
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    tokens: int = 100_000
    window: int = 512
    output: Path | None = None

    @property
    def changes(self) -> str:
        """Name of the quantization to compare with the unquantized model. Empty without quantization."""
        products = "FP8 products" if self.quantization == "fp8" else ""
        cache = "FP8 cache" if self.kv_cache_dtype == "fp8_e4m3" else ""
        return ", ".join(filter(None, (products, cache)))


def run_perplexity(options: PerplexityOptions) -> int:
    """Run `outrider bench perplexity`: measure, print the table and save the result. Return the exit code.

    Raises:
        ConfigurationError: The text or the tokenizer is missing, or the text is too short. The message names
            the flag.
    """
    windows = list(cut_windows(_token_ids(options), options.window, options.tokens))
    if not windows:
        raise ConfigurationError(
            f"--text {options.text}: the text has fewer than two tokens.", field="--text"
        )
    passes = len(windows) * (2 if options.changes else 1)
    with Progress("perplexity", passes, counts=False) as progress:
        rows = _measure(options, windows, progress.advance)
    settings = {
        **asdict(options),
        "text": options.text.name,
        "target": options.target.name,
        "device": str(options.device),
        "dtype": str(options.dtype).removeprefix("torch."),
    }
    del settings["output"]
    return show_and_save(Result("perplexity", settings, rows), options.output, ("tokens", "increase_percent"))


def _measure(
    options: PerplexityOptions, windows: Sequence[list[int]], on_window: Callable[[], None]
) -> list[Row]:
    counted = {"tokens": sum(len(window) - 1 for window in windows)}
    plain = measure_perplexity(_load(options, changed=False), windows, on_window)
    rows = [Row(WIDE, plain, "perplexity", plain, WIDE, counted)]
    if options.changes:
        other = measure_perplexity(_load(options, changed=True), windows, on_window)
        more = {**counted, "increase_percent": round(100 * (other / plain - 1), 4)}
        rows.append(Row(options.changes, other, "perplexity", plain, WIDE, more))
    return rows


@torch.inference_mode()
def measure_perplexity(
    decoder: Decoder, windows: Iterable[list[int]], on_window: Callable[[], None] = lambda: None
) -> float:
    """Return the perplexity: the exponential of the mean negative log-likelihood.

    The mean is over all tokens that have a predecessor in their window. `on_window` is called after each
    window.
    """
    narrow = decoder.kv_dtype is not None
    attention = create_backend(AttentionKind.TRITON if narrow else AttentionKind.AUTO, decoder.device)
    pool = None
    total, count = 0.0, 0
    for window in windows:
        if pool is None or pool.capacity_tokens < len(window):
            pool = decoder.make_pool(-(-len(window) // 16), 16)
        lease = pool.lease(len(window))
        assert lease is not None
        attention.plan(build_batch(pool, [lease], [0], [len(window)]))
        ids = torch.tensor(window, device=decoder.device)
        hidden = decoder.forward(
            ids, torch.arange(len(window), device=decoder.device), attention, pool
        ).hidden
        logits = decoder.logits(hidden[:-1]).float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(window) - 1
        lease.release()
        on_window()
    return math.exp(total / count)


def cut_windows(token_ids: Iterable[list[int]], window: int, tokens: int) -> Iterator[list[int]]:
    """Cut tokenized texts into windows of at most `window` tokens, up to `tokens` counted tokens in all.

    A last window of only one token is dropped, because it contains no token to predict.
    """
    counted = 0
    for ids in token_ids:
        for first in range(0, len(ids), window):
            part = ids[first : first + window][: tokens - counted + 1]
            if len(part) > 1:
                yield part
                counted += len(part) - 1
            if counted >= tokens:
                return


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file: each line of a JSON-lines file, or the whole content of any other file.

    Raises:
        ConfigurationError: The file does not exist, or a line has none of the fields in `TEXT_FIELDS`.
    """
    if not path.is_file():
        raise ConfigurationError(f"--text {path}: this file does not exist.", field="--text")
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fields = json.loads(line)
        parts = [str(fields[name]) for name in TEXT_FIELDS if fields.get(name)]
        if not parts:
            raise ConfigurationError(
                f"--text {path}: line {number} has none of {', '.join(TEXT_FIELDS)}.", field="--text"
            )
        yield "\n".join(parts)


def _token_ids(options: PerplexityOptions) -> Iterator[list[int]]:
    file = options.target / "tokenizer.json"
    if not file.is_file():
        raise ConfigurationError(
            f"--target {options.target}: there is no tokenizer.json. "
            "Make one with `outrider convert tokenizer`.",
            field="--target",
        )
    tokenizer = Tokenizer.from_file(str(file))
    for text in read_texts(options.text):
        yield tokenizer.encode(text).ids


def _load(options: PerplexityOptions, *, changed: bool) -> Decoder:
    decoder = load_decoder(options.target, options.device, options.dtype)
    if changed and options.quantization == "fp8":
        quantize_decoder(decoder)
    if changed and options.kv_cache_dtype == "fp8_e4m3":
        decoder.kv_dtype = torch.float8_e4m3fn
    return decoder
