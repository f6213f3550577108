"""Trains the demo's target model from scratch: corpus, tokenizer and Llama.

``python -m outrider.train.target --out models/demo/target --gsm8k train.jsonl --minutes 4``
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from outrider.shared.obs.progress import Progress
from outrider.train import tokenizer as tok
from outrider.train.corpus.base import CorpusSplit
from outrider.train.data import build_rows, make_mix, read_rows, sample_texts
from outrider.train.model import Llama, LlamaShape, save_target
from outrider.train.optim import Clock, Optimiser

IGNORE = -100  # Label of tokens that cross_entropy ignores.
SMOKE_SHAPE = LlamaShape(
    vocab_size=512,
    hidden_size=32,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=64,
)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="outrider.train.target", description="Train the demo's target model.")
    p.add_argument(
        "--out", type=Path, required=True, help="directory to write the checkpoint to (Hugging Face layout)"
    )
    p.add_argument("--gsm8k", type=Path, help="GSM8K's train.jsonl, to mix into the generated corpus")
    p.add_argument("--gsm8k-rate", type=float, default=0.05, help="fraction of exchanges drawn from GSM8K")
    p.add_argument("--rows", type=int, default=80_000, help="number of training conversations")
    p.add_argument("--length", type=int, default=1024, help="tokens per conversation")
    p.add_argument("--batch", type=int, default=64, help="conversations per step")
    p.add_argument("--steps", type=int, default=1_000_000, help="maximum number of steps")
    p.add_argument(
        "--minutes",
        type=float,
        default=4.0,
        help="maximum training time, without data generation and compilation",
    )
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    p.add_argument("--layers", type=int, default=12, help="number of decoder layers")
    p.add_argument("--seed", type=int, default=1, help="seed of corpus and initialisation")
    p.add_argument("--smoke", action="store_true", help="use tiny sizes, for a quick test on a CPU")
    return p


def _loss(model: Llama, rows: Tensor) -> Tensor:
    ids, predict = read_rows(rows)
    labels = torch.where(predict, ids, IGNORE)[:, 1:]
    ids = ids[:, :-1]
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        logits, _ = model(ids)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)


@torch.no_grad()
def mean_loss(model: Llama, rows: Tensor, batch: int) -> float:
    """Return the mean cross entropy of stored rows [n, length], in nats per predicted token."""
    return math.fsum(float(_loss(model, part)) * len(part) for part in torch.split(rows, batch)) / len(rows)


def make_tokenizer(args: argparse.Namespace, vocab_size: int) -> Tokenizer:
    """Train the tokenizer on a sample of the corpus and on GSM8K."""
    texts = sample_texts(
        args.seed + 7,
        60 if args.smoke else 2500,
        make_mix(CorpusSplit.TRAIN, args.gsm8k, args.gsm8k_rate),
        3000,
    )
    return tok.train_tokenizer(texts, vocab_size)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the command. Return the numbers that are also written to ``training.json``."""
    args = _parser().parse_args(argv)
    shape = SMOKE_SHAPE if args.smoke else LlamaShape(num_hidden_layers=args.layers)
    if args.smoke:
        args.rows, args.length, args.batch, args.steps = 64, 96, 8, min(args.steps, 30)
    # 1. Tokenizer and data.
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    tok.save(make_tokenizer(args, shape.vocab_size), args.out, shape.max_position_embeddings)
    workers = 1 if args.smoke else len(os.sched_getaffinity(0))
    path = args.out / "tokenizer.json"
    train = build_rows(
        path, args.rows, args.length + 1, args.seed, CorpusSplit.TRAIN, args.gsm8k, args.gsm8k_rate, workers
    )
    held = build_rows(
        path,
        16 if args.smoke else 256,
        args.length + 1,
        args.seed + 1,
        CorpusSplit.HELDOUT,
        None,
        0.0,
        workers,
    )
    padding = float((train == tok.BOS_ID).float().mean())
    print(
        f"corpus: {train.numel() / 1e6:.1f} M tokens, {padding:.4f} padding, "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )

    # 2. Model, optimiser and compilation.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = Llama(shape).to(device)
    train, held = train.to(device), held.to(device)
    optimiser = Optimiser(model, args.lr)
    loss_of = torch.compile(_loss) if device == "cuda" else _loss
    torch.autograd.backward(loss_of(model, train[: args.batch]))  # Compile before the clock starts.
    for p in model.parameters():
        p.grad = None
    # 3. Training.
    clock = Clock(args.steps, args.minutes)
    order = torch.randperm(len(train), device=device)
    loss = torch.zeros(())
    with Progress("training", 1.0, counts=False) as progress:
        while clock.progress() < 1:
            at = clock.done * args.batch % (len(train) - args.batch + 1)
            if at < args.batch:
                order = torch.randperm(len(train), device=device)
            loss = loss_of(model, train[order[at : at + args.batch]])
            torch.autograd.backward(loss)
            optimiser.step(clock.factor())
            if clock.done % 200 == 0:
                print(
                    f"step {clock.done} loss {float(loss.detach()):.4f} progress {clock.progress():.3f}",
                    flush=True,
                )
            clock.tick()
            progress.tell(min(1.0, clock.progress()), step=f"step {clock.done}")
    # 4. Checkpoint and measurements.
    save_target(model, args.out)
    seconds = time.monotonic() - clock.start
    numbers = {
        "steps": clock.done,
        "tokens_millions": clock.done * args.batch * args.length / 1e6,
        "train_seconds": seconds,
        "last_train_loss": float(loss.detach()),
        "heldout_answer_loss": mean_loss(model, held, args.batch),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (args.out / "training.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(numbers), flush=True)
    return numbers


if __name__ == "__main__":
    main()
