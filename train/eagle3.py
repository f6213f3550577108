"""Trains an EAGLE-3 head by training-time test, on text that the target itself generates.

A part of this text consists of answers under random JSON schemas (`train.forms`).

In training-time test (EAGLE-3, Li et al., arXiv 2503.01840), the head is unrolled for several steps. Each
step after the first reads the head's own features of the previous step, as it does when the head drafts.

    python -m outrider.train.eagle3 --target models/demo/target --out models/demo/eagle3 \\
        --gsm8k train.jsonl --minutes 2.5
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from outrider.shared.obs.progress import Progress
from outrider.train.corpus.base import CorpusSplit
from outrider.train.data import build_rows, read_rows
from outrider.train.forms import FormedAnswers, Forms, TokenSets, restricted
from outrider.train.generate import continue_rows, cut_points
from outrider.train.head import TrainableEagle3Head, read_trained_head, save_head, soft_loss
from outrider.train.model import Llama, read_trained_target
from outrider.train.optim import Clock, Optimiser
from outrider.train.tokenizer import BOS_ID, START


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="outrider.train.eagle3", description="Train an EAGLE-3 head by training-time test."
    )
    p.add_argument(
        "--target", type=Path, required=True, help="checkpoint directory written by outrider.train.target"
    )
    p.add_argument(
        "--out", type=Path, required=True, help="directory to write the head to (published EAGLE-3 layout)"
    )
    p.add_argument("--gsm8k", type=Path, help="GSM8K's train.jsonl, to mix into the prompts")
    p.add_argument("--gsm8k-rate", type=float, default=0.05, help="fraction of exchanges drawn from GSM8K")
    p.add_argument("--rows", type=int, default=32_768, help="conversations that the target continues")
    p.add_argument(
        "--schema-rows", type=int, default=0, help="further conversations, answered under random JSON schemas"
    )
    p.add_argument("--schemas", type=int, default=2048, help="number of random JSON schemas")
    p.add_argument(
        "--init", type=Path, help="directory of a head to train further, with its draft vocabulary"
    )
    p.add_argument("--generate-batch", type=int, default=4096, help="conversations to continue in one batch")
    p.add_argument("--length", type=int, default=512, help="tokens per conversation")
    p.add_argument("--batch", type=int, default=64, help="conversations per step")
    p.add_argument("--steps", type=int, default=1_000_000, help="maximum number of steps")
    p.add_argument(
        "--minutes",
        type=float,
        default=2.5,
        help="maximum training time, without data generation and compilation",
    )
    p.add_argument("--ttt", type=int, default=6, help="number of unrolled steps in the training-time test")
    p.add_argument("--decay", type=float, default=0.8, help="loss weight of step i is decay**i")
    p.add_argument("--draft-vocab", type=int, default=2048, help="size of the draft vocabulary")
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    p.add_argument("--seed", type=int, default=11, help="seed of prompts, sampling and initialisation")
    p.add_argument("--smoke", action="store_true", help="use tiny sizes, for a quick test on a CPU")
    return p


@dataclass(frozen=True, slots=True)
class Writing:
    """Settings of the text that the target writes.

    Attributes:
        tokenizer: The target's tokenizer.
        batch: Number of rows that the target continues at the same time.
        seed: Seed of the sampling.
        levels: Temperatures. The rows use them in turn. 0 is greedy.
    """

    tokenizer: Tokenizer
    batch: int
    seed: int
    levels: tuple[float, ...] = (0.0, 0.7, 1.0, 1.0)


def regenerate(
    target: Llama,
    rows: Tensor,
    writing: Writing,
    progress: Progress,
    forms: Forms | None = None,
    sets: TokenSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep the start of each row of tokens as a prompt, and let the target generate the rest of the row.

    Args:
        target: The target.
        rows: [n, length] token ids.
        writing: Settings of the generation.
        progress: Shows the number of finished batches.
        forms: The schemas of the answers, or None if the target may write any text.
        sets: Receives the sets of tokens that the schemas allow. Required if `forms` is given.

    Returns:
        The rows, and the numbers of the sets of allowed tokens; see `continue_rows`.
    """
    header = writing.tokenizer.encode(START + "assistant\n").ids
    device = target.model.embed_tokens.weight.device
    generator = torch.Generator().manual_seed(writing.seed)
    cuts = cut_points(rows, generator, header[1], len(header), rows.shape[1] // 2)
    levels = torch.tensor(writing.levels)
    texts, allowed = [], []
    pieces = torch.split(rows, writing.batch)
    for i, part in enumerate(pieces):
        progress.tell(i, len(pieces))
        first = i * writing.batch
        cut = cuts[first : first + len(part)]
        answers = None
        if forms is not None and sets is not None:
            answers = FormedAnswers(forms, sets, first, cut.tolist(), header)
        text, numbers = continue_rows(
            target,
            part.long().to(device),
            cut.to(device),
            levels[torch.arange(len(part)) % len(levels)].to(device),
            writing.seed + i,
            answers,
        )
        texts.append(text.to(rows.dtype))
        allowed.append(numbers)
    return torch.cat(texts), torch.cat(allowed)


def draft_vocabulary(rows: Tensor, vocab: int, size: int) -> Tensor:
    """Return the ``size`` most frequent token ids in ascending order."""
    counts = torch.bincount(rows.flatten().long(), minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def share_of(ids: Tensor, rows: Tensor, vocab: int) -> float:
    """Return the share of all tokens of the rows that are among these ids."""
    counts = torch.bincount(rows.flatten().long(), minlength=vocab)
    return float(counts[ids].sum() / counts.sum())


class Trainer(nn.Module):
    """Computes the loss of a batch. The target is frozen, so only the unrolled head has gradients."""

    def __init__(self, target: Llama, head: TrainableEagle3Head, num_steps: int, decay: float) -> None:
        super().__init__()
        self.target, self.head, self.num_steps, self.decay = target, head, num_steps, decay
        in_draft = torch.zeros(target.shape.vocab_size, dtype=torch.bool, device=head.draft_ids.device)
        self.in_draft = in_draft.index_fill(0, head.draft_ids, True)

    def forward(self, rows: Tensor, allowed: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch.

        Args:
            rows: [bs, length] int64 token ids.
            allowed: [bs, length] integers, the number of the set of allowed tokens after each token.
            table: [sets, words] int32, the sets of tokens.

        Returns:
            The loss, and for each step the fraction of rows with the target's choice, [num_steps].
        """
        length = rows.shape[1] - self.num_steps
        with torch.no_grad():
            logits, features = self.target(rows)
            logits = restricted(logits, allowed, table)
            labels = logits.argmax(-1)
            soft = logits[..., self.head.draft_ids].float().softmax(-1)
            usable = rows != BOS_ID
            embeddings = self.target.model.embed_tokens(rows[:, 1:])
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            steps = self.head.unroll(features[:, :length].to(embeddings.dtype), embeddings, self.num_steps)
        loss = torch.zeros((), device=rows.device)
        hits = []
        for i, draft in enumerate(steps):
            label = labels[:, 1 + i : 1 + i + length]
            seen = usable[:, 1 + i : 1 + i + length]
            loss = loss + self.decay**i * soft_loss(
                draft, soft[:, 1 + i : 1 + i + length], (seen & self.in_draft[label]).float()
            )
            hits.append(((self.head.draft_ids[draft.argmax(-1)] == label) & seen).float().sum() / seen.sum())
        return loss, torch.stack(hits).detach()


@torch.no_grad()
def accuracy_of(trainer: Trainer, rows: Tensor, allowed: Tensor, table: Tensor, batch: int) -> list[float]:
    """Return for each unrolled step the share of positions with the target's choice."""
    parts = zip(torch.split(rows, batch), torch.split(allowed, batch), strict=True)
    hits = torch.stack([trainer(part.long(), numbers, table)[1] for part, numbers in parts])
    return [round(hit, 4) for hit in hits.mean(0).tolist()]


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Run the command. Return the numbers that the command also writes to ``training.json``."""
    args = _parser().parse_args(argv)
    if args.smoke:
        args.rows, args.generate_batch, args.length, args.batch, args.steps, args.draft_vocab = (
            64,
            32,
            64,
            8,
            min(args.steps, 20),
            256,
        )
        args.schema_rows, args.schemas = min(args.schema_rows, 32), 8
    # 1. Generate text with the target.
    started = time.monotonic()
    tokenizer_file = args.target / "tokenizer.json"
    workers = 1 if args.smoke else len(os.sched_getaffinity(0))
    corpus = build_rows(
        tokenizer_file,
        args.rows + args.schema_rows,
        args.length,
        args.seed,
        CorpusSplit.TRAIN,
        args.gsm8k,
        args.gsm8k_rate,
        workers,
    )
    corpus = read_rows(corpus)[0].to(corpus.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    target = read_trained_target(args.target).to(device).requires_grad_(False)
    if device == "cuda":
        target = target.bfloat16()
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    vocab = target.shape.vocab_size
    sets = TokenSets(vocab, device)
    with Progress("generating text", counts=False) as progress:
        writing = Writing(tokenizer, args.generate_batch, args.seed)
        rows, allowed = regenerate(target, corpus[: args.rows], writing, progress)
        unchanged = corpus[: args.rows // 5].to(device)
        if args.schema_rows:
            forms = Forms.random(tokenizer_file, vocab, args.schemas, args.seed)
            writing = Writing(tokenizer, args.generate_batch, args.seed + 1000, (0.0, 0.0, 0.7, 1.0))
            formed, formed_allowed = regenerate(target, corpus[args.rows :], writing, progress, forms, sets)
    print(f"target wrote {rows.numel() / 1e6:.1f} M tokens, {time.monotonic() - started:.0f} s", flush=True)
    held = {"accuracy_per_step": (rows[: args.batch * 2], allowed[: args.batch * 2])}
    rows = torch.cat((rows[args.batch * 2 :], unchanged))
    allowed = torch.cat((allowed[args.batch * 2 :], torch.zeros_like(unchanged, dtype=torch.int32)))
    if args.schema_rows:
        print(
            f"and {formed.numel() / 1e6:.1f} M under schemas, {len(sets.table)} sets of tokens",
            flush=True,
        )
        held["accuracy_per_step_under_schemas"] = formed[: args.batch * 2], formed_allowed[: args.batch * 2]
        rows = torch.cat((rows, formed[args.batch * 2 :]))
        allowed = torch.cat((allowed, formed_allowed[args.batch * 2 :]))
    # 2. Choose the draft vocabulary, build the head and compile it.
    if args.init is None:
        draft_ids = draft_vocabulary(rows, vocab, args.draft_vocab)
        head = TrainableEagle3Head(target.shape, draft_ids).to(device)
        with torch.no_grad():  # A head learns faster if it starts from the target's output rows.
            head.lm_head.weight.copy_(target.model.embed_tokens.weight[draft_ids])
    else:
        head = read_trained_head(args.init, target.shape).to(device)
    coverage = share_of(head.draft_ids, rows, vocab)
    trainer = Trainer(target, head, args.ttt, args.decay)
    optimiser = Optimiser(head, args.lr)
    step_of = torch.compile(trainer) if device == "cuda" else trainer
    torch.autograd.backward(step_of(rows[: args.batch].long(), allowed[: args.batch], sets.table)[0])
    for p in head.parameters():
        p.grad = None
    # 3. Train the head.
    clock = Clock(args.steps, args.minutes)
    order = torch.randperm(len(rows), device=device)
    with Progress("training", 1.0, counts=False) as progress:
        while clock.progress() < 1:
            at = clock.done * args.batch % (len(rows) - args.batch + 1)
            if at < args.batch:
                order = torch.randperm(len(rows), device=device)
            chosen = order[at : at + args.batch]
            loss, hits = step_of(rows[chosen].long(), allowed[chosen], sets.table)
            torch.autograd.backward(loss)
            optimiser.step(clock.factor())
            if clock.done % 200 == 0:
                print(
                    f"step {clock.done} loss {float(loss.detach()):.4f} "
                    f"accuracy {[round(h, 3) for h in hits.tolist()]}",
                    flush=True,
                )
            clock.tick()
            progress.tell(min(1.0, clock.progress()), step=f"step {clock.done}")
    # 4. Write the checkpoint and the measurements.
    save_head(head, target, args.out)
    numbers: dict[str, object] = {
        "steps": clock.done,
        "tokens_millions": clock.done * args.batch * args.length / 1e6,
        "train_seconds": time.monotonic() - clock.start,
        "draft_vocab_coverage": coverage,
        **{name: accuracy_of(trainer, *part, sets.table, args.batch) for name, part in held.items()},
        "parameters": sum(p.numel() for p in head.parameters()),
    }
    (args.out / "training.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(numbers), flush=True)
    return numbers


if __name__ == "__main__":
    main()
