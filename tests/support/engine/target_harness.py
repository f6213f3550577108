"""A target engine on a toy model, stepped in the test's own thread, and drafters that propose given trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from outrider.kernels.philox import gumbel_noise
from outrider.kernels.verify.filters import filter_logits
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.engine.recorder import GraphRecorder
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.token_states import sparse_layers
from outrider.services.target.request import EngineRequest, SpeculationLimits
from outrider.services.target.scheduling.limits import EngineLimits, SchedulerLimits
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.shared.attn.base import AttentionBackend, build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import NO_LOGPROBS, LogprobParams
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.open import load_decoder
from outrider.shared.spec.drafter import (
    Commits,
    Drafter,
    DrafterState,
    FeatureSpec,
    ProposalRequest,
    ProposalRow,
    SequenceOpen,
)
from outrider.shared.spec.tree import DraftBatch, mask_words
from support.engine.collector import Collector
from support.engine.unbounded_share import UnboundedShare
from support.outputs.rule_oracle import ruled
from support.suite.compute_device import DEVICE

Node = tuple[int, int]
"""Token and parent index of a draft node. The root is node 0 and is not listed."""


class FakeDrafter(Drafter):
    """Follows sequences like a real drafter and checks the engine's calls.

    The drafter proposes the nodes that `plan` returns for the arguments (tokens so far, row).
    """

    def __init__(
        self, plan: Callable[[list[int], ProposalRow], list[Node]], spec: FeatureSpec | None = None
    ) -> None:
        self.plan = plan
        self.spec = spec or FeatureSpec()
        self.sequences: dict[int, list[int]] = {}
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.lost: list[int] = []
        self.current_state = DrafterState.ON
        self.opens = self.nodes_proposed = 0

    def feature_spec(self) -> FeatureSpec | None:
        return self.spec

    def state(self) -> DrafterState:
        return self.current_state

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        for sequence in sequences:
            self.opens += 1
            assert sequence.fence.committed_len == len(sequence.token_ids)
            self.sequences[sequence.fence.session_id] = list(sequence.token_ids)
            self.rows[sequence.fence.session_id] = []

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        assert base == len(self.rows[session_id]), "rows must arrive in order"
        self.rows[session_id].extend(rows)

    def commit(self, result: Commits) -> None:
        for commit in result.commits:
            tokens = self.sequences[commit.fence.session_id]
            assert commit.base_len == len(tokens), "commits must be gapless"
            tokens.extend(commit.token_ids)
            assert commit.fence.committed_len == len(tokens)
            if commit.features is not None:
                rows = self.rows[commit.fence.session_id]
                assert len(rows) == commit.base_len - 1
                assert len(commit.features) == len(commit.token_ids)
                rows.extend(commit.features)

    def announce(self, request: ProposalRequest) -> None:
        pass

    def propose(self, request: ProposalRequest) -> DraftBatch:
        trees = []
        for row in request.rows:
            tokens = self.sequences[row.fence.session_id]
            assert row.fence.committed_len == len(tokens)
            assert row.root_token == tokens[-1]
            nodes = self.plan(tokens, row)
            assert len(nodes) < row.shape.max_nodes
            self.nodes_proposed += len(nodes)
            trees.append((row.root_token, nodes))
        return trees_to_batch(trees)

    def wants_reopen(self) -> Sequence[int]:
        lost, self.lost = self.lost, []
        return lost

    def fallback_reason(self, session_id: int) -> str:
        return "fake"

    def close(self, session_ids: Sequence[int]) -> None:
        for session_id in session_ids:
            del self.sequences[session_id]
            del self.rows[session_id]

    def shutdown(self) -> None:
        pass


def trees_to_batch(trees: Sequence[tuple[int, list[Node]]]) -> DraftBatch:
    """Convert (root token, draft nodes) per row to padded tensors."""
    width = 1 + max(len(nodes) for _, nodes in trees)
    bs, words = len(trees), mask_words(width)
    tokens = torch.zeros(bs, width, dtype=torch.int32)
    parents = torch.full((bs, width), -1, dtype=torch.int32)
    depths = torch.zeros(bs, width, dtype=torch.int32)
    masks = [[[0] * words for _ in range(width)] for _ in range(bs)]
    for b, (root, nodes) in enumerate(trees):
        tokens[b, 0] = root
        bits = [1]
        for index, (token, parent) in enumerate(nodes, 1):
            tokens[b, index], parents[b, index], depths[b, index] = token, parent, depths[b, parent] + 1
            bits.append(bits[parent] | 1 << index)
        for index, mask in enumerate(bits):
            for word in range(words):
                value = mask >> 32 * word & 0xFFFFFFFF
                masks[b][index][word] = value - (1 << 32) if value >= 1 << 31 else value
    num_nodes = torch.tensor([1 + len(nodes) for _, nodes in trees], dtype=torch.int32)
    return DraftBatch(tokens, parents, depths, num_nodes, torch.tensor(masks, dtype=torch.int32))


def oracle_plan(
    answers: Sequence[Sequence[int]], vocab_size: int, accuracy: float = 1.0, seed: int = 0
) -> Callable[[list[int], ProposalRow], list[Node]]:
    """Propose trees of the requested shape whose levels contain the true token with a probability."""
    rng = random.Random(seed)

    def plan(tokens: list[int], row: ProposalRow) -> list[Node]:
        truth: Sequence[int] = next(
            (answer[len(tokens) :] for answer in answers if list(answer[: len(tokens)]) == tokens), ()
        )
        nodes: list[Node] = []
        parent = 0
        for depth in range(row.shape.depth):
            level_start = len(nodes)
            siblings = rng.sample(range(vocab_size), min(row.shape.topk, vocab_size))
            if depth < len(truth) and rng.random() < accuracy:
                siblings[rng.randrange(len(siblings))] = truth[depth]
            for token in siblings:
                if len(nodes) + 1 < row.shape.max_nodes:
                    nodes.append((token, parent))
            if len(nodes) == level_start:
                break
            wanted = [
                index
                for index in range(level_start, len(nodes))
                if depth < len(truth) and nodes[index][0] == truth[depth]
            ]
            parent = 1 + (wanted[0] if wanted else rng.randrange(level_start, len(nodes)))
        return nodes

    return plan


def random_plan(vocab_size: int, seed: int = 0) -> Callable[[list[int], ProposalRow], list[Node]]:
    """Propose trees of random size and form with random tokens. Siblings may have the same token."""
    rng = random.Random(seed)

    def plan(tokens: list[int], row: ProposalRow) -> list[Node]:
        count = rng.randrange(row.shape.max_nodes)
        return [(rng.randrange(vocab_size), rng.randrange(index + 1)) for index in range(count)]

    return plan


@dataclass
class Harness:
    """An engine with a toy model. `run` steps the engine until it is idle."""

    engine: TargetEngine
    scheduler: Scheduler
    runner: ModelRunner
    sink: Collector
    limits: SpeculationLimits = field(default_factory=SpeculationLimits)

    def submit(self, *request: Any, **fields: Any) -> int:
        return self.engine.submit(self.request(*request, **fields), self.sink)

    def request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 16,
        *,
        request_id: str | None = None,
        sampling: SamplingParams | None = None,
        mode: SpeculationMode = SpeculationMode.ON,
        shape: tuple[int, int, int] | None = None,
        trace: bool = False,
        stop: Sequence[int] = (),
        ignore_eos: bool = False,
        deadline: float | None = None,
        priority: int = 0,
        logprobs: LogprobParams = NO_LOGPROBS,
        salt: str = "",
        resume: Sequence[int] = (),
        **form: Any,
    ) -> EngineRequest:
        depth, topk, max_nodes = shape or (None, None, None)
        return EngineRequest(
            request_id=request_id or f"r{len(self.sink.tokens) + self.engine.num_live}",
            prompt_ids=tuple(prompt),
            max_new_tokens=max_new_tokens,
            sampling=sampling or SamplingParams(temperature=0.0),
            speculation=self.limits.resolve(mode, depth=depth, topk=topk, max_nodes=max_nodes, trace=trace),
            stop_token_ids=frozenset(stop),
            ignore_eos=ignore_eos,
            deadline=deadline,
            priority=priority,
            logprobs=logprobs,
            cache_salt=salt,
            resume_ids=tuple(resume),
            **form,
        )

    def step(self) -> None:
        self.engine.step()
        self.scheduler.check()

    def check_idle(self) -> None:
        """Assert that every page is free, unless a request is live."""
        self.scheduler.check()
        assert self.engine.num_live or self.scheduler.allocator.held_pages == 0

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work():
                self.check_idle()
                return
            self.step()
        raise AssertionError("the engine did not become idle")


def make_harness(
    decoder: Decoder,
    drafter: Drafter,
    *,
    num_pages: int = 192,
    page_size: int = 16,
    max_model_len: int = 4096,
    eos: Sequence[int] = (),
    plan: LoopPlan | None = None,
    graphs: GraphCache | None = None,
    attention: AttentionBackend | None = None,
    recorder: GraphRecorder | None = None,
    prefill_sizes: Sequence[int] = (),
    **limits: int,
) -> Harness:
    """Make an engine without a thread, which reads each round before it launches the next by default.

    Every row of a fixed shape gets its tree, because the times of toy rounds differ from run to run.
    """
    pool = decoder.make_pool(num_pages, page_size)
    attention = attention or create_backend("auto", decoder.device)
    runner = ModelRunner(decoder, pool, attention, graphs=graphs, prefill_sizes=prefill_sizes)
    scheduler = Scheduler(pool.allocator, page_size, SchedulerLimits(**limits))
    engine_limits = EngineLimits(
        decoder.config.vocab_size, max_model_len, frozenset(eos), routes=bool(sparse_layers(decoder))
    )
    engine = TargetEngine(runner, scheduler, drafter, engine_limits, plan=plan, recorder=recorder)
    engine._planner._share = UnboundedShare()
    return Harness(engine, scheduler, runner, Collector())


def generate_plain(
    decoder: Decoder, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int, **options: object
) -> list[int]:
    """Return the output of plain decoding for a single prompt.

    Many tests compare with the same output. It is therefore generated once per decoder, prompt and sampling,
    unless `drafter` or further `options` could change it.
    """
    if type(drafter) is not NoDrafter or set(options) - {"sampling"}:
        return _generate_alone(decoder, drafter, prompt, max_new_tokens, **options)
    known = _KNOWN.setdefault(decoder, {})
    key = tuple(prompt), options.get("sampling")
    if len(known.get(key, ())) < max_new_tokens:
        known[key] = _generate_alone(decoder, drafter, prompt, max_new_tokens, **options)
    return known[key][:max_new_tokens]


_KNOWN: WeakKeyDictionary[Decoder, dict[tuple[object, ...], list[int]]] = WeakKeyDictionary()
PLAIN_PAGES = 64
"""Pages of the pool for plain decoding, unless the request needs more."""


def _generate_alone(
    decoder: Decoder, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int, **options: object
) -> list[int]:
    pages = max(PLAIN_PAGES, (len(prompt) + max_new_tokens) // 16 + 4)
    harness = make_harness(decoder, drafter, num_pages=pages)
    harness.submit(prompt, max_new_tokens, request_id="plain", mode=SpeculationMode.OFF, **options)  # type: ignore[arg-type]
    harness.run()
    return harness.sink.tokens["plain"]


def load_toy(path: Path) -> Decoder:
    """Load a toy target in fp32 on the device that tests use."""
    return load_decoder(path, DEVICE, torch.float32)


def next_logits(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits ``[n, V] fp32`` after each token, from one pass over all of `tokens`."""
    with torch.inference_mode():
        return decoder.logits(hidden_of(decoder, tokens)).float().cpu()


def hidden_of(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Return the hidden states ``[n, hidden_size]`` of all tokens, from one pass over all of them."""
    pool = decoder.make_pool(-(-len(tokens) // 16), 16)
    lease = pool.lease(len(tokens))
    assert lease is not None
    attention = create_backend("auto", decoder.device)
    attention.plan(build_batch(pool, [lease], [0], [len(tokens)]))
    ids = torch.tensor(tokens, device=decoder.device)
    positions = torch.arange(len(tokens), device=decoder.device)
    with torch.inference_mode():
        return decoder.forward(ids, positions, attention, pool).hidden


def next_scores(
    decoder: Decoder,
    tokens: Sequence[int],
    sampling: SamplingParams,
    prompt_len: int | None = None,
    stops: Sequence[int] = (),
) -> torch.Tensor:
    """Return the scores ``[V]``: the logits after rules, filters and noise. Their argmax is the next token.

    One pass over all of `tokens`, the prompt and the output so far, computes the scores. `prompt_len` is None
    for a request without rules. `stops` are the tokens that end the text.
    """
    scores = next_logits(decoder, tokens)[-1:]
    if prompt_len is not None:
        scores = ruled(scores[0], tokens[:prompt_len], tokens[prompt_len:], sampling.rules, stops)[None]
    if sampling.temperature > 0:
        row = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
        filters = [torch.tensor([getattr(sampling, name)], dtype=dtype) for name, dtype in row.items()]
        scores = filter_logits(scores / sampling.temperature, *filters)
        seed = torch.tensor([sampling.seed - (1 << 64) if sampling.seed >> 63 else sampling.seed])
        choice = torch.tensor([sampling.choice_index], dtype=torch.int32)
        scores = scores + gumbel_noise(seed, torch.tensor([len(tokens)]), choice, scores.shape[1])
    return scores[0]


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the index of the first differing token, or None for equal outputs."""
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    assert at is not None or len(expected) == len(found), (
        f"one output is a prefix of the other: {len(expected)} and {len(found)} tokens"
    )
    return at


def assert_same_tokens(
    decoder: Decoder,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    sampling: SamplingParams | None = None,
) -> None:
    """Assert that two outputs have equal tokens, as the project defines it.

    The first difference is allowed where the two best scores of the plain run differ by less than 1e-4.
    """
    at = first_difference(expected, found)
    if at is None:
        return
    params = sampling or SamplingParams(temperature=0.0)
    best = next_scores(decoder, [*prompt, *expected[:at]], params, len(prompt)).topk(2).values
    gap = float(best[0] - best[1])
    print(f"near-tie at token {at}: {expected[at]} or {found[at]}, top-two gap {gap:.2e}")
    assert gap < 1e-4, f"token {at} is {found[at]}, plain decoding chose {expected[at]}; gap {gap:.2e}"
