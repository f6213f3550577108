"""The embedded pair and random toy pairs, with the real draft engine in the target's process.

The tests check that speculation emits the same tokens as plain decoding and as transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toys import make_toy_eagle3, make_toy_target
from support.suite.compute_device import DEVICE

from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
TARGET, HEAD = ROOT / "models" / "demo" / "target", ROOT / "models" / "demo" / "eagle3"
SHAPES = [(5, 4, 16), (5, 1, 6), (3, 2, 8), (8, 4, 40)]
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=17),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=18),
]
NEW_TOKENS = 64


def make_drafter(decoder: Decoder, head: Path) -> InprocDrafter:
    return drafter_beside(
        decoder, DraftSettings.load({"draft": head, "device": str(DEVICE), "kv_tokens": 16384})
    )


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_toy(TARGET)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (ROOT / "bench" / "prompts" / "heldout.jsonl").read_text().splitlines()[:8]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "temperature 1", "all filters"])
def test_the_embedded_pair_writes_the_targets_own_tokens(
    decoder: Decoder, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    """Each of the samplings with a seed gets one half of the prompts, with every shape."""
    if sampling is not GREEDY:
        prompts = prompts[SAMPLINGS.index(sampling) % 2 :: 2]
    harness = make_harness(decoder, make_drafter(decoder, HEAD), max_running=8)
    for index, prompt in enumerate(prompts):
        harness.submit(
            prompt, NEW_TOKENS, request_id=str(index), sampling=sampling, shape=SHAPES[index % len(SHAPES)]
        )
    harness.run()
    harness.check_idle()
    for index, prompt in enumerate(prompts):
        plain = generate_plain(decoder, NoDrafter(), prompt, NEW_TOKENS, sampling=sampling)
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], sampling)
    accept_lengths = [finished.speculation.accept_length for finished in harness.sink.finished.values()]
    print("accept lengths", [round(length, 2) for length in accept_lengths])
    assert sum(accept_lengths) / len(accept_lengths) > 2.5


def test_the_embedded_pair_writes_what_transformers_writes(
    decoder: Decoder, prompts: list[list[int]]
) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    harness = make_harness(decoder, make_drafter(decoder, HEAD), max_running=8)
    for index, prompt in enumerate(prompts):
        harness.submit(
            prompt, NEW_TOKENS, request_id=str(index), shape=SHAPES[index % len(SHAPES)], ignore_eos=True
        )
    harness.run()
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=[],
        )
        assert_same_tokens(
            decoder, prompt, output[0, len(prompt) :].tolist(), harness.sink.tokens[str(index)]
        )


@pytest.mark.parametrize("seed", range(3))
def test_random_pairs_change_no_token(tmp_path: Path, seed: int) -> None:
    """Over the three pairs, each prompt and its shape meet every sampling."""
    target = make_toy_target(tmp_path / "target", vocab_size=64, seed=seed, num_layers=3)
    head = make_toy_eagle3(tmp_path / "head", target, draft_vocab_size=40, seed=seed)
    decoder = load_toy(target)
    harness = make_harness(decoder, make_drafter(decoder, head), max_running=4, prefill_chunk=32)
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(0, 64, (length,), generator=generator).tolist() for length in (1, 2, 31, 64, 150, 500)
    ]
    cases = [
        (prompt, SAMPLINGS[(number + seed) % len(SAMPLINGS)], shape)
        for number, (prompt, shape) in enumerate(zip(prompts, [*SHAPES, (1, 1, 2), (4, 8, 60)], strict=True))
    ]
    for index, (prompt, sampling, shape) in enumerate(cases):
        harness.submit(prompt, 24, request_id=str(index), sampling=sampling, shape=shape)
    harness.run()
    harness.check_idle()
    for index, (prompt, sampling, _) in enumerate(cases):
        plain = generate_plain(decoder, NoDrafter(), prompt, 24, sampling=sampling)
        assert_same_tokens(decoder, prompt, plain, harness.sink.tokens[str(index)], sampling)
        assert harness.sink.finished[str(index)].speculation.draft_tokens > 0
