"""Perplexity of a model on a text, as it is and with FP8 products or an FP8 cache: what the rounding costs.

Texts are cut into windows that are read in one pass each, through the pool and the attention that serve; the first token of a window has no
history and is not counted. Both models read the same windows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from outrider.bench.report.record import Result, Row, finish
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import AttentionKind, create_backend
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.nn.quantized import quantize_fp8

WIDE = "as it is"
"""The model in the type that it is served in: what rounding can at best keep."""
TEXT_FIELDS = ("text", "prompt", "question", "answer")


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    """What to measure.

    Attributes:
        text: A text file, or JSON lines whose fields `TEXT_FIELDS` are joined.
        target: Model folder with a tokenizer.json.
        device, dtype: Where, and of what type.
        quantization: ``none`` or ``fp8``.
        kv_cache_dtype: ``auto`` or ``fp8_e4m3``.
        tokens: At most so many are counted.
        window: Tokens per pass.
        output: JSON file or folder; None: bench/results.
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
        """What is compared with the model as it is; empty for nothing."""
        products = "FP8 products" if self.quantization == "fp8" else ""
        cache = "FP8 cache" if self.kv_cache_dtype == "fp8_e4m3" else ""
        return ", ".join(filter(None, (products, cache)))


def run_perplexity(options: PerplexityOptions) -> int:
    """Measure, print, write; returns the exit code.

    Raises:
        ConfigurationError: The text or the tokenizer is missing, or too short; names the flag.
    """
    windows = list(cut_windows(_token_ids(options), options.window, options.tokens))
    if not windows:
        raise ConfigurationError(f"--text {options.text}: holds fewer than two tokens.", field="--text")
    counted = {"tokens": sum(len(window) - 1 for window in windows)}
    plain = perplexity(_load(options, changed=False), windows)
    rows = [Row(WIDE, plain, "perplexity", plain, WIDE, counted)]
    if options.changes:
        other = perplexity(_load(options, changed=True), windows)
        more = {**counted, "increase_percent": round(100 * (other / plain - 1), 4)}
        rows.append(Row(options.changes, other, "perplexity", plain, WIDE, more))
    settings = {
        **asdict(options),
        "text": options.text.name,
        "target": options.target.name,
        "device": str(options.device),
        "dtype": str(options.dtype).removeprefix("torch."),
    }
    del settings["output"]
    return finish(Result("perplexity", settings, rows), options.output, ("tokens", "increase_percent"))


@torch.inference_mode()
def perplexity(decoder: Decoder, windows: Iterable[list[int]]) -> float:
    """Return exp of the mean negative log-likelihood of every token that has a history in its window."""
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
    return math.exp(total / count)


def cut_windows(token_ids: Iterable[list[int]], window: int, tokens: int) -> Iterator[list[int]]:
    """Cut each text into windows of at most that many tokens until `tokens` are counted; a rest of one token is dropped."""
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
    """Return the texts of a file: its whole, or one per JSON line.

    Raises:
        ConfigurationError: There is no such file, or a line has none of the fields.
    """
    if not path.is_file():
        raise ConfigurationError(f"--text {path}: there is no such file.", field="--text")
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
            f"--target {options.target}: has no tokenizer.json; `outrider convert tokenizer` makes one.",
            field="--target",
        )
    tokenizer = Tokenizer.from_file(str(file))
    for text in read_texts(options.text):
        yield tokenizer.encode(text).ids


def _load(options: PerplexityOptions, *, changed: bool) -> Decoder:
    decoder = load_decoder(options.target, options.device, options.dtype)
    if changed and options.quantization == "fp8":
        quantize_fp8(decoder)
    if changed and options.kv_cache_dtype == "fp8_e4m3":
        decoder.kv_dtype = torch.float8_e4m3fn
    return decoder
