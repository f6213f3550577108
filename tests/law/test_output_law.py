"""The output law: over many seeds, emitted tokens follow the target's distribution, also with speculation.

With a vocabulary of 5 and depth 3, the first three tokens after a fixed prompt have 125 outcomes. Their
probabilities are products of the target's conditional probabilities. All 2·10⁵ seeds run in one batch through
the engine's own functions (`choose_tokens`, `verify_tree`). The engine itself runs fewer seeds, and must emit
the tokens that these functions choose.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import FakeDrafter, load_toy, make_harness, oracle_plan
from support.models.toys import make_toy_target
from support.suite.compute_device import DEVICE

from outrider.kernels.verify import SamplingTensors, choose_tokens, verify_tree
from outrider.shared.base.generation import SamplingParams
from outrider.shared.nn.decoder import Decoder

torch.set_num_threads(1)
VOCAB = 5
DEPTH = 3
SEEDS = 200_000
PROMPT_LEN = 4
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def conditionals() -> dict[tuple[int, ...], torch.Tensor]:
    """Logits after every history of up to two tokens, for a made-up language of five words."""
    generator = torch.Generator().manual_seed(7)
    histories = [()] + [(a,) for a in range(VOCAB)] + [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
    return {history: 0.5 * torch.randn(VOCAB, generator=generator).to(DEVICE) for history in histories}


def exact_law(conditionals: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    """Return the probabilities of the 125 outcomes."""
    law = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for a in range(VOCAB):
        for b in range(VOCAB):
            for c in range(VOCAB):
                parts = (((), a), ((a,), b), ((a, b), c))
                law[a, b, c] = math.prod(
                    float(torch.softmax(conditionals[history].double() / TEMPERATURE, -1)[token])
                    for history, token in parts
                )
    return law.flatten()


def chi_square_p(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Return the p-value of the counts under the law (124 degrees of freedom)."""
    expected = law * counts.sum()
    assert expected.min() > 5, "the test needs every outcome often enough"
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_degrees = torch.tensor((len(law) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, statistic / 2))


def sampling_rows(seeds: torch.Tensor) -> SamplingTensors:
    rows = len(seeds)
    return SamplingTensors(
        temperature=torch.full((rows,), TEMPERATURE, device=DEVICE),
        top_k=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        top_p=torch.ones(rows, device=DEVICE),
        min_p=torch.zeros(rows, device=DEVICE),
        seeds=seeds,
        choices=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        all_greedy=False,
        any_filter=False,
    )


def logits_after(conditionals: dict[tuple[int, ...], torch.Tensor], histories: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, 5]``, the logits after histories ``[rows, n]``."""
    length = histories.shape[1]
    table = torch.stack([conditionals[history] for history in product(range(VOCAB), repeat=length)])
    weights = torch.tensor([VOCAB ** (length - 1 - i) for i in range(length)], device=DEVICE)
    return table[(histories * weights).sum(1)] if length else table.expand(len(histories), -1)


def plain_tokens(conditionals: dict[tuple[int, ...], torch.Tensor], seeds: torch.Tensor) -> torch.Tensor:
    """Return ``[seeds, 3]``, tokens sampled one by one."""
    tokens = torch.zeros(len(seeds), 0, dtype=torch.int64, device=DEVICE)
    sampling = sampling_rows(seeds)
    for depth in range(DEPTH):
        chosen = choose_tokens(
            logits_after(conditionals, tokens),
            sampling,
            torch.full((len(seeds),), PROMPT_LEN + depth, device=DEVICE),
        )
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
    return tokens


def speculative_tokens(
    conditionals: dict[tuple[int, ...], torch.Tensor], seeds: torch.Tensor, drafts: torch.Tensor
) -> torch.Tensor:
    """Return ``[seeds, 3]``, tokens from rounds that verify trees.

    Args:
        conditionals: Logits after every history.
        seeds: Seeds of the rows.
        drafts: ``[seeds, 2, 2]`` (level, sibling), the drafted tokens.
    """
    count = len(seeds)
    tokens = torch.zeros(count, DEPTH, dtype=torch.int64, device=DEVICE)
    done = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    while int(done.min()) < DEPTH:
        for base in range(DEPTH):
            rows = (done == base).nonzero().squeeze(1)
            if len(rows):
                emitted, num = _round(conditionals, seeds[rows], tokens[rows, :base], drafts[rows])
                for offset in range(emitted.shape[1]):
                    wanted = (offset < num) & (base + offset < DEPTH)
                    tokens[rows[wanted], min(base + offset, DEPTH - 1)] = emitted[wanted, offset]
                done[rows] = (base + num).clamp(max=DEPTH)
    return tokens


def _round(
    conditionals: dict[tuple[int, ...], torch.Tensor],
    seeds: torch.Tensor,
    prefix: torch.Tensor,
    drafts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify the tree root → two siblings → two children of the second sibling.

    The nodes are 0, (1, 2) and (3, 4).
    """
    count, base = prefix.shape
    tokens = torch.cat((torch.zeros(count, 1, dtype=torch.int64, device=DEVICE), drafts.flatten(1)), dim=1)
    parents = torch.tensor([[-1, 0, 0, 2, 2]], device=DEVICE).expand(count, -1)
    chosen = []
    for node, path in enumerate(((), (1,), (2,), (2, 3), (2, 4))):
        history = torch.cat((prefix, tokens[:, list(path)]), dim=1)
        if history.shape[1] > DEPTH - 1:
            chosen.append(
                torch.zeros(count, dtype=torch.int64, device=DEVICE)
            )  # choices after the third token are not used
        else:
            positions = torch.full((count,), PROMPT_LEN + base + len(path), device=DEVICE)
            chosen.append(choose_tokens(logits_after(conditionals, history), sampling_rows(seeds), positions))
        assert node == len(chosen) - 1
    num_nodes = torch.full((count,), 5, dtype=torch.int32, device=DEVICE)
    verified = verify_tree(tokens.int(), parents.int().contiguous(), num_nodes, torch.stack(chosen, dim=1))
    return verified.emitted.long(), verified.num_accepted.long() + 1


def test_plain_sampling_follows_the_law(conditionals: dict[tuple[int, ...], torch.Tensor]) -> None:
    tokens = plain_tokens(conditionals, torch.arange(SEEDS, device=DEVICE) * 7919 + 11)
    p = chi_square_p(_counts(tokens), exact_law(conditionals))
    print(f"chi-square p = {p:.3f}")
    assert p > 1e-3


@pytest.mark.parametrize("drafted", ["likely", "random", "one token"])
def test_speculative_sampling_follows_the_law_and_equals_plain(
    conditionals: dict[tuple[int, ...], torch.Tensor], drafted: str
) -> None:
    seeds = torch.arange(SEEDS, device=DEVICE) * 7919 + 11
    generator = torch.Generator().manual_seed(3)
    drafts = torch.randint(0, VOCAB, (SEEDS, 2, 2), generator=generator).to(DEVICE)
    if drafted == "likely":
        best = conditionals[()].topk(2).indices
        drafts = torch.stack((best, best)).expand(SEEDS, -1, -1)
    elif drafted == "one token":
        drafts = torch.full((SEEDS, 2, 2), 3, device=DEVICE)
    tokens = speculative_tokens(conditionals, seeds, drafts)
    assert torch.equal(tokens, plain_tokens(conditionals, seeds))
    p = chi_square_p(_counts(tokens), exact_law(conditionals))
    print(f"chi-square p = {p:.3f}")
    assert p > 1e-3


def test_the_test_notices_a_wrong_law(conditionals: dict[tuple[int, ...], torch.Tensor]) -> None:
    tilt = 0.02 * torch.arange(VOCAB, device=DEVICE)
    wrong = {history: logits if history else logits + tilt for history, logits in conditionals.items()}
    tokens = plain_tokens(wrong, torch.arange(SEEDS, device=DEVICE) * 7919 + 11)
    assert chi_square_p(_counts(tokens), exact_law(conditionals)) < 1e-3


def _counts(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount((tokens.cpu() * torch.tensor([25, 5, 1])).sum(1), minlength=125).double()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = make_toy_target(
        tmp_path_factory.mktemp("target"), vocab_size=VOCAB, hidden_size=16, num_layers=3, seed=5
    )
    return load_toy(path)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 5)])
def test_the_engines_output_follows_the_models_law(decoder: Decoder, shape: tuple[int, int, int]) -> None:
    """Run 2,000 seeds through the whole engine.

    First tokens and pairs of tokens must follow the model's own probabilities.
    """
    prompt = [1, 2, 3]
    count = 2000
    drafter = FakeDrafter(oracle_plan([], VOCAB, 0.0, seed=1))
    harness = make_harness(decoder, drafter, max_running=64, num_pages=4096, max_queued=count)
    for seed in range(count):
        sampling = SamplingParams(temperature=1.0, seed=seed * 104729)
        harness.submit(prompt, 2, request_id=str(seed), sampling=sampling, shape=shape)
    harness.run()
    assert (drafter.nodes_proposed > 0) == (shape[2] > 1)
    pairs = torch.tensor([harness.sink.tokens[str(seed)] for seed in range(count)])
    first = _next_probabilities(decoder, [prompt])[0]
    law = first[:, None] * _next_probabilities(decoder, [[*prompt, token] for token in range(VOCAB)])
    expected = (law * count).flatten()
    counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB * VOCAB).double()
    likely = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[likely].sum()
    rest_expected, rest = expected[~likely].sum(), counts[~likely].sum()
    degrees = int(likely.sum()) - 1
    if rest_expected > 0:
        statistic = statistic + (rest - rest_expected) ** 2 / rest_expected
        degrees += 1
    p = float(torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), statistic.double() / 2))
    print(f"chi-square p = {p:.3f} with {degrees} degrees of freedom")
    assert p > 1e-3


def _next_probabilities(decoder: Decoder, histories: list[list[int]]) -> torch.Tensor:
    from outrider.shared.attn.base import build_batch
    from outrider.shared.attn.create import create_backend

    rows = []
    for tokens in histories:
        pool = decoder.make_pool(1, 16)
        lease = pool.lease(len(tokens))
        assert lease is not None
        attention = create_backend("auto", DEVICE)
        attention.plan(build_batch(pool, [lease], [0], [len(tokens)]))
        ids, positions = torch.tensor(tokens, device=DEVICE), torch.arange(len(tokens), device=DEVICE)
        output = decoder.forward(ids, positions, attention, pool)
        rows.append(torch.softmax(decoder.logits(output.hidden[-1:])[0].double(), -1).cpu())
    return torch.stack(rows)
