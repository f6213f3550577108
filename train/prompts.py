"""Writes held-out prompts of the generated corpus.

``python -m outrider.train.prompts --out bench/prompts/heldout.jsonl``
"""

import argparse
import json
from pathlib import Path
from random import Random

from outrider.train.corpus.conversations import heldout_prompts


def main(argv: list[str] | None = None) -> None:
    """Write the prompts in random order, one ``{"prompt", "topic"}`` object per line."""
    p = argparse.ArgumentParser(
        prog="outrider.train.prompts",
        description="Write held-out prompts: training uses neither their templates nor their entities.",
    )
    p.add_argument("--out", type=Path, required=True, help="JSON Lines file to write")
    p.add_argument("--per-topic", type=int, default=7, help="number of prompts per topic")
    p.add_argument("--seed", type=int, default=2024, help="random seed")
    args = p.parse_args(argv)
    prompts = list(heldout_prompts(args.seed, args.per_topic))
    Random(args.seed).shuffle(prompts)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        "".join(
            json.dumps({"prompt": text, "topic": topic}, ensure_ascii=False) + "\n" for topic, text in prompts
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
