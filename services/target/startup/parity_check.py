"""The parity check at startup: verifying a tree must yield exactly the tokens of plain decoding."""

from __future__ import annotations

import logging
import time

import torch

from outrider.services.target.engine.rounds import advance
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import FAILED_TOKEN
from outrider.services.target.policy.controller import ExecutedRow, ExecutedStep, SpeculationController
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.services.target.startup.trial_sequences import PROMPT_LEN, release, trial_sequence
from outrider.shared.base.errors import UnavailableError
from outrider.shared.spec.tree import DraftBatch
from outrider.shared.spec.trees import root_trees

PLAIN_STEPS = 8
TREE_DEPTH = 4
LOW_PRECISION_RETRIES = 3
"""With bf16 or fp16, the result of a near-tie depends on the row count; another prompt is tried then."""

_log = logging.getLogger("outrider.target")


def check_parity(runner: ModelRunner, controller: SpeculationController) -> None:
    """Check that verifying a tree yields the tokens of plain decoding.

    A few tokens are generated plainly. Then a tree that contains them among wrong siblings is verified. The
    controller learns the time of the plain steps.

    Raises:
        UnavailableError: The tree yields other tokens, or the logits are NaN or infinite. The process must
            not serve.
    """
    attempts = 1 if runner.decoder.dtype == torch.float32 else LOW_PRECISION_RETRIES
    for attempt in range(attempts):
        plain = _plain(runner, attempt, controller)
        tree = _tree(runner, attempt, plain)
        if tree == plain[1 : 2 + TREE_DEPTH]:
            return
        _log.warning("parity check %d: plain %s, tree %s", attempt, plain, tree)
    raise UnavailableError(
        "The warm-up parity check failed: verifying a tree yields other tokens than plain decoding on this "
        "device. Try --attention-backend reference, and report the problem.",
        reason="parity_check_failed",
    )


def _plain(runner: ModelRunner, attempt: int, controller: SpeculationController) -> list[int]:
    """Return the first 1 + PLAIN_STEPS greedy tokens."""
    sequence = trial_sequence(runner, attempt)
    try:
        emitted = _prefill(runner, sequence)
        for _ in range(PLAIN_STEPS):
            started = time.monotonic()
            outcomes, _features = runner.verify([sequence], root_trees(sequence.tokens[-1:], runner.device))
            seconds = time.monotonic() - started
            controller.observe(ExecutedStep([ExecutedRow(None, 1, 0, 0)], 0, None, seconds, 0.0))
            emitted += outcomes[0].emitted
            advance(sequence, outcomes[0].emitted)
            sequence.cached_len += 1
        if FAILED_TOKEN in emitted:
            raise UnavailableError(
                "The model's logits are NaN or infinite: the checkpoint is damaged.",
                reason="nan_logits",
            )
        return emitted
    finally:
        release(sequence)


def _tree(runner: ModelRunner, attempt: int, plain: list[int]) -> list[int]:
    """Verify a tree whose second child at every level is the plain token. Return the emitted tokens."""
    sequence = trial_sequence(runner, attempt)
    try:
        _prefill(runner, sequence)
        drafts = _tree_with_decoys(
            plain[0], plain[1 : 1 + TREE_DEPTH], runner.decoder.config.vocab_size, runner.device
        )
        outcomes, _features = runner.verify([sequence], drafts)
        return outcomes[0].emitted
    finally:
        release(sequence)


def _tree_with_decoys(root: int, truth: list[int], vocab_size: int, device: torch.device) -> DraftBatch:
    tokens, parents, depths, masks = [root], [-1], [0], [1]
    parent = 0
    for depth, token in enumerate(truth, 1):
        for candidate in ((token + 1) % vocab_size, token):
            masks.append(masks[parent] | 1 << len(tokens))
            tokens.append(candidate)
            parents.append(parent)
            depths.append(depth)
        parent = len(tokens) - 1

    def row(values: list[int]) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.int32, device=device)

    return DraftBatch(row(tokens), row(parents), row(depths), row([len(tokens)])[0], row(masks)[:, :, None])


def _prefill(runner: ModelRunner, sequence: Sequence) -> list[int]:
    emitted = runner.prefill([PrefillChunk(sequence, 0, PROMPT_LEN)])
    sequence.cached_len = PROMPT_LEN
    advance(sequence, emitted)
    return emitted
