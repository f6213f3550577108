"""Checks that a prompt with a stored prefix gets what a computed prompt gets, for one kind of engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import Drafter, FeatureSpec
from support.engine.target_harness import FakeDrafter, Harness, assert_same_tokens, oracle_plan

PAGE = 4
PROMPT_LEN = 50
STORED = 48
"""Number of tokens of the full pages of a prompt."""
NEW_TOKENS = 12
CHUNK = 20
BEFORE = 6
"""Number of tokens that a request emits before it is preempted."""
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=7)
TREE = (3, 2, 8)

ON, OFF = SpeculationMode.ON, SpeculationMode.OFF
SERIES = {
    "drafts first": ((ON, GREEDY), (ON, GREEDY), (OFF, SAMPLED)),
    "plain first": ((OFF, GREEDY), (ON, GREEDY), (ON, SAMPLED), (OFF, GREEDY)),
}
"""The requests with one salt. The first request of each series computes the prompt."""

MakeHarness = Callable[..., Harness]
"""Makes an engine for a drafter. Further arguments replace those of `make_harness`."""


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One kind of engine.

    Attributes:
        make: Makes an engine of this kind.
        judge: The model in one process, which decides whether a difference is a near-tie.
        exact: True if tokens and feature rows must have equal bits.
    """

    make: MakeHarness
    judge: Decoder
    exact: bool = False

    @property
    def vocab(self) -> int:
        """Number of tokens of the vocabulary."""
        return self.judge.config.vocab_size

    def prompt(self, seed: int) -> list[int]:
        """Return a random prompt of `PROMPT_LEN` tokens. Equal seeds give equal prompts."""
        rng = random.Random(seed)
        return [rng.randrange(self.vocab) for _ in range(PROMPT_LEN)]

    def plain(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Return the answer of plain decoding without a prefix cache."""
        harness = self._engine(NoDrafter(self.judge.device), prefix_cache=False)
        harness.submit(
            prompt,
            NEW_TOKENS,
            request_id="plain",
            mode=SpeculationMode.OFF,
            sampling=sampling,
            ignore_eos=True,
        )
        harness.run()
        return harness.sink.tokens["plain"]

    def check_hits(self) -> None:
        """Check tokens and feature rows of hits, with and without speculation, in a pool with room."""
        prompt = self.prompt(1)
        answers = {one: self.plain(prompt, one) for one in (GREEDY, SAMPLED)}
        drafter = _KeepingDrafter(
            oracle_plan([prompt + answer for answer in answers.values()], self.vocab, 0.8),
            self._features(),
        )
        harness = self._engine(drafter)
        for salt, kinds in SERIES.items():
            for index, (mode, sampling) in enumerate(kinds):
                name = f"{salt} {index}"
                harness.submit(
                    prompt,
                    NEW_TOKENS,
                    request_id=name,
                    mode=mode,
                    shape=TREE,
                    sampling=sampling,
                    salt=salt,
                    ignore_eos=True,
                )
                harness.run()
                assert harness.sink.finished[name].cached_tokens == (STORED if index else 0)
                self._same(prompt, answers[sampling], harness.sink.tokens[name], sampling)
                accepted = harness.sink.finished[name].speculation.accepted_tokens
                assert mode is SpeculationMode.OFF or accepted, "drafts should be accepted"
        computed, *found = (torch.stack(rows[: PROMPT_LEN - 1]) for rows in drafter.kept)
        assert len(computed) == PROMPT_LEN - 1
        assert len(found) == 3
        tolerance = 0.0 if self.exact else 2e-2 if self.judge.dtype is torch.float32 else 0.2
        for rows in found:
            torch.testing.assert_close(rows, computed, atol=tolerance, rtol=tolerance)

    def check_preemption(self) -> None:
        """Check a request that loses its place to a more important one, and finds its pages again."""
        prompts = [self.prompt(seed) for seed in (2, 3)]
        answers = [self.plain(prompt, GREEDY) for prompt in prompts]
        truth = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        drafter = FakeDrafter(oracle_plan(truth, self.vocab, 0.5), self._features())
        harness = self._engine(drafter, max_running=1)
        harness.submit(prompts[0], NEW_TOKENS, request_id="0", shape=TREE, ignore_eos=True)
        while len(harness.sink.tokens.get("0", ())) < BEFORE:
            harness.step()
        harness.submit(prompts[1], NEW_TOKENS, request_id="1", shape=TREE, ignore_eos=True, priority=1)
        (preempted,) = (one for one in harness.scheduler if one.request.request_id == "0")
        while preempted.residence < 2:
            harness.step()
        assert preempted.found_len > STORED, "the pages of the answer should be found too"
        harness.run()
        assert harness.scheduler.num_retractions == 1
        for index, prompt in enumerate(prompts):
            self._same(prompt, answers[index], harness.sink.tokens[str(index)], GREEDY)

    def _engine(self, drafter: Drafter, **options: int) -> Harness:
        return self.make(drafter, page_size=PAGE, prefill_chunk=CHUNK, **{"num_pages": 128, **options})

    def _features(self) -> FeatureSpec:
        return FeatureSpec(aux_layer_ids=(1,), feature_size=self.judge.config.hidden_size, fingerprint="raw")

    def _same(
        self, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int], sampling: SamplingParams
    ) -> None:
        if self.exact:
            assert found == expected
        else:
            assert_same_tokens(self.judge, prompt, expected, found, sampling)


class _KeepingDrafter(FakeDrafter):
    """Keeps the feature rows of closed sequences, in order, as ``kept``."""

    kept: list[list[torch.Tensor]]

    def close(self, session_ids: Sequence[int]) -> None:
        self.kept = [*getattr(self, "kept", []), *(self.rows[one] for one in session_ids)]
        super().close(session_ids)
