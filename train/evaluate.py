"""Measures a head's accept length with the simple drafter in `reference`, and measures the target's loss.

    python -m outrider.train.evaluate --target models/demo/target --head models/demo/eagle3 \\
        --prompts bench/prompts/heldout.jsonl
"""

import argparse
import json
from collections import Counter
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer

from outrider.train.corpus import gsm8k
from outrider.train.corpus.base import CorpusSplit
from outrider.train.corpus.conversations import TOPICS
from outrider.train.data import build_rows
from outrider.train.model import read_trained_target
from outrider.train.reference import (
    ReferenceHead,
    ReferenceTarget,
    Sampling,
    TreeShape,
    generate_without_draft,
    speculate,
)
from outrider.train.target import mean_loss
from outrider.train.tokenizer import END, END_ID, render_prompt

FACTUAL = (
    "countries",
    "explain",
    "arithmetic",
    "units",
    "code",
)  # Topics whose questions have exactly one right answer.
MODES = {"T=0": Sampling(0.0, 0), "T=1": Sampling(1.0, 0), "T=1 coupled": Sampling(1.0, 0, coupled=True)}


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="outrider.train.evaluate",
        description="Measure the accept length of an EAGLE-3 head with a plain-torch reference.",
    )
    p.add_argument("--target", type=Path, required=True, help="checkpoint directory of the target")
    p.add_argument("--head", type=Path, required=True, help="checkpoint directory of the EAGLE-3 head")
    p.add_argument("--prompts", type=Path, help="JSON Lines file of {prompt, topic} objects")
    p.add_argument("--gsm8k", type=Path, help="GSM8K's test.jsonl, used only to measure")
    p.add_argument("--gsm8k-count", type=int, default=40, help="number of GSM8K questions to use")
    p.add_argument(
        "--max-new", type=int, default=128, help="tokens to generate per prompt, past the end of text"
    )
    p.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES), help="sampling modes")
    p.add_argument("--limit", type=int, help="use only this many prompts of each set")
    p.add_argument("--num-steps", type=int, default=5, help="levels of the tree")
    p.add_argument("--topk", type=int, default=4, help="branching factor of the tree")
    p.add_argument("--num-draft-tokens", type=int, default=16, help="verified nodes, including the root")
    p.add_argument(
        "--check", action="store_true", help="also generate without speculation, and count equal outputs"
    )
    p.add_argument(
        "--loss-rows",
        type=int,
        default=0,
        help="number of conversations per split on which to measure the target's loss",
    )
    p.add_argument(
        "--answers",
        type=int,
        default=0,
        help="number of questions per factual topic on which to count exactly right greedy answers",
    )
    p.add_argument("--out", type=Path, help="JSON file to write")
    return p


def measure_setting(
    target: ReferenceTarget,
    head: ReferenceHead,
    prompts: list[tuple[str, list[int]]],
    max_new: int,
    shape: TreeShape,
    mode: Sampling,
    check: bool,
) -> dict[str, Any]:
    """Answer all prompts with one setting of sampling and speculation, and return statistics.

    Returns:
        A dict. ``accept_length`` is the number of emitted tokens, including bonus tokens, divided by the
        number of rounds, over all prompts. ``per_topic`` contains this ratio for each topic. ``histogram``
        contains the number of rounds for each number of emitted tokens. ``accept_length_within_answer`` is
        the accept length without the tokens after the first end of turn.
    """
    rounds: dict[str, list[int]] = {}
    equal = answer_tokens = answer_rounds = 0
    for i, (topic, ids) in enumerate(prompts):
        sampling = Sampling(mode.temperature, 1000 + i, mode.coupled)
        run = speculate(target, head, ids, max_new, shape, sampling)
        rounds.setdefault(topic, []).extend(run.emitted)
        end = (
            run.tokens.index(END_ID) if END_ID in run.tokens else len(run.tokens) - 1
        )  # Token 0 comes from the prefill, not from a round.
        answer_tokens += end
        answer_rounds += sum(before < end for before in accumulate(run.emitted[:-1], initial=0))
        equal += int(check and run.tokens == generate_without_draft(target, ids, max_new, sampling))
    total = [n for topic in rounds.values() for n in topic]
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "rounds": len(total),
        "accept_length": round(sum(total) / len(total), 3),
        "accept_length_within_answer": round(answer_tokens / max(1, answer_rounds), 3),
        "histogram": {str(k): v for k, v in sorted(Counter(total).items())},
        "per_topic": {topic: round(sum(ns) / len(ns), 3) for topic, ns in sorted(rounds.items())},
    }
    return result | ({"equal_to_plain": equal} if check else {})


def losses(directory: Path, count: int) -> dict[str, float]:
    """Return the target's loss, in nats per token, on three kinds of conversations that training did not use.

    - ``fresh``: training templates and entities in new combinations, generated from other seeds.
    - ``rephrased_answers``: answers to questions with held-out templates about training entities.
    - ``heldout_answers``: answers to questions with held-out templates about held-out entities. Training did
      not contain the facts about these entities.
    """
    model = read_trained_target(directory)
    length = min(1025, model.shape.max_position_embeddings)
    splits = {
        "fresh": CorpusSplit.TRAIN,
        "rephrased_answers": CorpusSplit.REPHRASED,
        "heldout_answers": CorpusSplit.HELDOUT,
    }
    rows = {
        name: build_rows(directory / "tokenizer.json", count, length, 777, split, None, 0.0, 1)
        for name, split in splits.items()
    }
    return {name: round(mean_loss(model, part, 4), 4) for name, part in rows.items()}


def exact_answers(
    target: ReferenceTarget, tokenizer: Any, split: CorpusSplit, count: int
) -> dict[str, float]:
    """Return, for each factual topic, the fraction of greedy answers that equal the corpus's answer."""
    result = {}
    for topic in (t for t in TOPICS if t.name in FACTUAL):
        rng = Random(4242)
        right = 0
        for _ in range(count):
            question, answer = topic.make(rng, split)[0]
            # Skip questions for any list of countries, because these have no unique answer.
            while question.endswith("capitals.") or "countries" in question:
                question, answer = topic.make(rng, split)[0]
            expected = tokenizer.encode(answer + END, add_special_tokens=False)
            prompt = tokenizer.encode(render_prompt(question), add_special_tokens=False)
            right += int(generate_without_draft(target, prompt, len(expected), MODES["T=0"]) == expected)
        result[topic.name] = round(right / count, 3)
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the command. Return the numbers that the command also writes to ``--out``."""
    args = _parser().parse_args(argv)
    shape = TreeShape(args.num_steps, args.topk, args.num_draft_tokens)
    if not 2 <= shape.num_draft_tokens <= 1 + shape.topk + (shape.num_steps - 1) * shape.topk**2:
        raise SystemExit(
            "--num-draft-tokens must be between 2 and 1 + topk + (num_steps - 1) * topk^2, "
            "the number of drafted candidates plus the root"
        )
    # 1. Load the models and the prompts.
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = ReferenceTarget(args.target)
    head = ReferenceHead(args.head, target.model.get_input_embeddings().weight.detach())
    sets: dict[str, list[tuple[str, str]]] = {}
    if args.prompts:
        records = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
        sets["heldout"] = [(r["topic"], r["prompt"]) for r in records]
    if args.gsm8k:
        sets["gsm8k_test"] = [
            ("gsm8k", question) for question, _ in gsm8k.load(args.gsm8k)[: args.gsm8k_count]
        ]
    result: dict[str, Any] = {
        "num_steps": shape.num_steps,
        "topk": shape.topk,
        "num_draft_tokens": shape.num_draft_tokens,
        "max_new_tokens": args.max_new,
    }
    # 2. Measure the quality of the target alone.
    if args.loss_rows:
        result["loss"] = losses(args.target, args.loss_rows)
        print("loss", json.dumps(result["loss"]), flush=True)
    if args.answers:
        result["exact_answers"] = {
            s.value: exact_answers(target, tokenizer, s, args.answers)
            for s in (CorpusSplit.TRAIN, CorpusSplit.REPHRASED)
        }
        print("exact answers", json.dumps(result["exact_answers"]), flush=True)
    # 3. Measure the accept lengths of the pair.
    for name, texts in sets.items():
        prompts = [
            (topic, tokenizer.encode(render_prompt(text), add_special_tokens=False))
            for topic, text in texts[: args.limit]
        ]
        for mode in args.modes:
            result.setdefault(name, {})[mode] = measure_setting(
                target, head, prompts, args.max_new, shape, MODES[mode], args.check
            )
            print(name, mode, json.dumps(result[name][mode]), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
