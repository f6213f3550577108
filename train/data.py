"""Makes token rows for training. Each row is a generated conversation, cut to the row's length."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.shared.obs.progress import Progress
from outrider.train.corpus import gsm8k
from outrider.train.corpus.base import CorpusSplit
from outrider.train.corpus.conversations import TopicMix, conversation
from outrider.train.tokenizer import BOS_ID, segments

_CHARS_PER_TOKEN = 6.5  # This estimate is high, because a low estimate would produce short rows with padding.


@dataclass(frozen=True, slots=True)
class RowJob:
    """Job of one process: the token rows that this process generates.

    Attributes:
        seed: Seed of this job. It determines all random choices.
        count: Number of rows.
        length: Number of tokens per row.
        tokenizer: Path of tokenizer.json.
        split: Templates and entities that the rows may use.
        gsm8k: Path of a GSM8K file, or None.
        gsm8k_rate: Fraction of exchanges drawn from the GSM8K file.
    """

    seed: int
    count: int
    length: int
    tokenizer: str
    split: CorpusSplit
    gsm8k: str | None
    gsm8k_rate: float


def make_mix(split: CorpusSplit, gsm8k_file: Path | None, gsm8k_rate: float) -> TopicMix:
    """Read GSM8K (if given) and return the conversation settings."""
    return TopicMix(split, tuple(gsm8k.load(gsm8k_file)) if gsm8k_file else (), gsm8k_rate)


def sample_texts(seed: int, count: int, mix: TopicMix, chars: int) -> list[str]:
    """Generate ``count`` conversations of at least ``chars`` characters, on which to train a tokenizer."""
    rng = Random(seed)
    return ["".join(text for text, _ in segments(*conversation(rng, mix, chars))) for _ in range(count)]


def read_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Decode stored rows.

    Returns int64 token ids, and a bool mask of the tokens that the model learns to predict.
    """
    rows = rows.long()
    return torch.where(rows < 0, -1 - rows, rows), rows > BOS_ID


def _run(job: RowJob) -> bytes:
    tokenizer = Tokenizer.from_file(job.tokenizer)
    mix = make_mix(job.split, Path(job.gsm8k) if job.gsm8k else None, job.gsm8k_rate)
    rng = Random(job.seed)
    rows = torch.full((job.count, job.length), BOS_ID, dtype=torch.int16)
    for i in range(job.count):
        ids: list[int] = []
        for text, predict in segments(*conversation(rng, mix, int(job.length * _CHARS_PER_TOKEN))):
            part = tokenizer.encode(text).ids
            ids += part if predict else [-1 - t for t in part]
        ids = ids[: job.length]
        rows[i, : len(ids)] = torch.tensor(ids, dtype=torch.int16)
    return rows.numpy().tobytes()


def build_rows(
    tokenizer: Path,
    count: int,
    length: int,
    seed: int,
    split: CorpusSplit,
    gsm8k_file: Path | None,
    gsm8k_rate: float,
    workers: int,
) -> Tensor:
    """Generate token rows in parallel. The result does not depend on the number of workers.

    Returns:
        [count, length] int16 on the CPU, which ``read_rows`` decodes. Short rows are padded with BOS_ID. A
        token that the model reads but does not learn to predict is stored as -1 - id.
    """
    shard = max(1, min(500, count))
    path = str(gsm8k_file) if gsm8k_file else None
    jobs = [
        RowJob(
            seed * 1_000_003 + start,
            min(shard, count - start),
            length,
            str(tokenizer),
            split,
            path,
            gsm8k_rate,
        )
        for start in range(0, count, shard)
    ]
    parts: list[bytes] = []
    if workers <= 1:
        with Progress("making conversations", len(jobs), counts=False) as progress:
            for job in jobs:
                parts.append(_run(job))
                progress.advance()
    else:
        # The bar starts after the pool, because worker processes must not be forked beside its thread.
        with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
            results = pool.map(_run, jobs)
            with Progress("making conversations", len(jobs), counts=False) as progress:
                for part in results:
                    parts.append(part)
                    progress.advance()
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int16).view(count, length)
