"""Trains an EAGLE-3 head by training-time test, on text that the target itself generates.

In training-time test (EAGLE-3, Li et al., arXiv 2503.01840), the head is unrolled for several steps. Each
step after the first reads the head's own features of the previous step, as it does when the head drafts.

    python -m outrider.train.eagle3 --target models/demo/target --out models/demo/eagle3 \\
        --gsm8k train.jsonl --minutes 2.5
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from outrider.shared.obs.progress import Progress
from outrider.train.corpus.base import Split
from outrider.train.data import build_rows, read_rows
from outrider.train.generate import continue_rows, cut_points
from outrider.train.head import Eagle3Head, save_head, soft_loss
from outrider.train.model import Llama, load_target
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


def regenerate(
    target: Llama, tokenizer: Tokenizer, rows: Tensor, batch: int, seed: int, progress: Progress
) -> Tensor:
    """Keep the start of each row of tokens as a prompt, and let the target generate the rest of the row.

    The temperature is 0 (greedy) for a quarter of the rows, 0.7 for a quarter and 1.0 for half. `progress`
    shows the number of finished batches.
    """
    header = tokenizer.encode(START + "assistant\n").ids
    device = target.model.embed_tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    cuts = cut_points(rows, generator, header[1], len(header), rows.shape[1] // 2)
    levels = torch.tensor([0.0, 0.7, 1.0, 1.0])
    parts = []
    pieces = torch.split(rows, batch)
    for i, part in enumerate(pieces):
        progress.tell(i, len(pieces))
        temperature = levels[torch.arange(len(part)) % 4].to(device)
        parts.append(
            continue_rows(
                target,
                part.long().to(device),
                cuts[i * batch : i * batch + len(part)].to(device),
                temperature,
                seed + i,
            ).to(rows.dtype)
        )
    return torch.cat(parts)


def draft_vocabulary(rows: Tensor, vocab: int, size: int) -> tuple[Tensor, float]:
    """Return the ``size`` most frequent token ids in ascending order, and their share of all tokens."""
    counts = torch.bincount(rows.flatten().long(), minlength=vocab)
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    return ids, float(counts[ids].sum() / counts.sum())


class Trainer(nn.Module):
    """Computes the loss of a batch. The target is frozen, so only the unrolled head has gradients."""

    def __init__(self, target: Llama, head: Eagle3Head, num_steps: int, decay: float) -> None:
        super().__init__()
        self.target, self.head, self.num_steps, self.decay = target, head, num_steps, decay
        in_draft = torch.zeros(target.shape.vocab_size, dtype=torch.bool, device=head.draft_ids.device)
        self.in_draft = in_draft.index_fill(0, head.draft_ids, True)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and for each step the fraction of rows with the target's argmax, [num_steps]."""
        length = rows.shape[1] - self.num_steps
        with torch.no_grad():
            logits, features = self.target(rows)
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
    # 1. Generate text with the target.
    started = time.monotonic()
    tokenizer_file = args.target / "tokenizer.json"
    workers = 1 if args.smoke else len(os.sched_getaffinity(0))
    corpus = build_rows(
        tokenizer_file, args.rows, args.length, args.seed, Split.TRAIN, args.gsm8k, args.gsm8k_rate, workers
    )
    corpus = read_rows(corpus)[0].to(corpus.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    target = load_target(args.target).to(device).requires_grad_(False)
    if device == "cuda":
        target = target.bfloat16()
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    with Progress("generating text", counts=False) as progress:
        rows = regenerate(target, tokenizer, corpus, args.generate_batch, args.seed, progress)
    print(f"target wrote {rows.numel() / 1e6:.1f} M tokens, {time.monotonic() - started:.0f} s", flush=True)
    held, rows = (
        rows[: args.batch * 2],
        torch.cat((rows[args.batch * 2 :], corpus[: len(corpus) // 5].to(device))),
    )
    # 2. Choose the draft vocabulary, build the head and compile it.
    draft_ids, coverage = draft_vocabulary(rows, target.shape.vocab_size, args.draft_vocab)
    head = Eagle3Head(target.shape, draft_ids).to(device)
    with torch.no_grad():  # A head learns faster if it starts from the target's output rows.
        head.lm_head.weight.copy_(target.model.embed_tokens.weight[draft_ids])
    trainer = Trainer(target, head, args.ttt, args.decay)
    optimiser = Optimiser(head, args.lr)
    step_of = torch.compile(trainer) if device == "cuda" else trainer
    torch.autograd.backward(step_of(rows[: args.batch].long())[0])
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
            loss, hits = step_of(rows[order[at : at + args.batch]].long())
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
    with torch.no_grad():
        accuracy = torch.stack([trainer(part.long())[1] for part in torch.split(held, args.batch)]).mean(0)
    numbers: dict[str, object] = {
        "steps": clock.done,
        "tokens_millions": clock.done * args.batch * args.length / 1e6,
        "train_seconds": time.monotonic() - clock.start,
        "draft_vocab_coverage": coverage,
        "accuracy_per_step": [round(a, 4) for a in accuracy.tolist()],
        "parameters": sum(p.numel() for p in head.parameters()),
    }
    (args.out / "training.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(numbers), flush=True)
    return numbers


if __name__ == "__main__":
    main()
