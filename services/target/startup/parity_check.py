"""The parity check at startup: verifying a tree must yield the logits of plain decoding, except for rounding.

The check decodes given tokens one at a time (plain decoding). Then it verifies the same tokens as one path of
a tree. The other nodes of the tree are decoys, which must not change the results of the path.

The check compares logits instead of chosen tokens, because rounding may decide between nearly equal logits.
It also compares the residual stream after every layer. Rounding errors grow from layer to layer, so they may
hide a fault in the logits.

A *stage* is the residual stream after a layer, or the logits. For every node of the path, the check makes
three comparisons:

1. At every stage, it compares the tree with plain decoding.
2. At every stage, it compares the tree with a second tree that differs only in its decoys. The passes over
   these two trees usually round in the same way.
3. After the first layer, it compares the tree with a causal chunk that has as many rows as the tree. Up to
   this stage, only attention may round differently in the two passes.

`rounding_bounds.py` defines a bound for each error. The error of a correct model may exceed its bound with
one prompt, for example if rounding selects another expert. A fault causes an error above the bound with every
prompt. The check therefore stops the start only if the same row exceeds its bound at the same stage with each
of several prompts.

With deterministic kernels, the tree and plain decoding must yield equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import FAILED_TOKEN
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.startup.rounding_bounds import Limits, Stages, bounds, errors, limits_of
from outrider.services.target.startup.trial_sequences import release, trial_sequence
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.base.errors import UnavailableError
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.upload import upload
from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.trees import HostTree, pad_trees

TREE_DEPTH = 6
PROMPTS = 3
PROMPTS_OF_EXPERTS = 5
"""Number of prompts to try before a mixture of experts is refused. For all other models, it is `PROMPTS`."""
_PROMPT_LEN = 4
"""Number of tokens of a prompt. With a short prompt, each ancestor of a node has much weight in attention.

Prompt and tree together still need more than one page of 16 tokens.
"""
_PATH = [2 * depth for depth in range(TREE_DEPTH + 1)]
"""Nodes of the path. At each level, the first child is a decoy, and the second child is on the path."""
_NUM_NODES = 1 + 2 * TREE_DEPTH

_log = get_logger("outrider.target")


@dataclass(frozen=True, slots=True)
class Parity:
    """Result of the parity check between the verification of a tree and plain decoding.

    Attributes:
        error: The error with the largest ratio to its bound, among all errors of the check.
        bound: The bound of `error`.
        stage: Stage of `error`: the index of a layer, or the number of layers if the stage is the logits.
        depth: Depth of the tree node with this error.
        limits: The limits for the model's data types.
    """

    error: float
    bound: float
    stage: int
    depth: int
    limits: Limits

    @property
    def passed(self) -> bool:
        """True if the error is at most its bound, so that rounding can be its cause."""
        return self.error <= self.bound


@torch.inference_mode()
def check_parity(runner: ModelRunner) -> Parity | None:
    """Check that verifying a tree yields the logits of plain decoding, and log the margin.

    Returns:
        The error with the largest ratio to its bound. With deterministic kernels, the check requires equal
        bits and returns None.

    Raises:
        UnavailableError: The logits or a layer's output differ by more than rounding can explain, or logits
            are NaN or infinite. The process must not serve.
        OutriderError: The KV cache is too small.
    """
    if isinstance(runner.attention, DeterministicAttention):
        _check_bits(runner)
        _log.info("parity check", bits="equal")
        return None
    limits = limits_of(runner.decoder, runner.pool)
    found, bound = _compare(runner, 0, limits)
    result = _worst(found, bound, limits)
    for prompt in range(1, PROMPTS_OF_EXPERTS if limits.may_route else PROMPTS):
        if result.passed:
            break
        _log.warning("parity check exceeds its bound", prompts=prompt, **_numbers(runner, result))
        more, its_bound = _compare(runner, prompt, limits)
        better = more / its_bound < found / bound
        found, bound = torch.where(better, more, found), torch.where(better, its_bound, bound)
        result = _worst(found, bound, limits)
    if not result.passed:
        raise UnavailableError(
            f"The parity check failed: verifying a tree changes {_place(runner, result.stage)} of a node of "
            f"depth {result.depth} by {result.error:.2%}, compared with plain decoding. Rounding in "
            f"{limits.name} explains at most {result.bound:.2%}. {_fix(runner)}",
            reason="parity_check_failed",
        )
    _log.info("parity check", **_numbers(runner, result))
    return result


def _compare(runner: ModelRunner, prompt: int, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors of the three comparisons and their bounds, both ``[comparisons, nodes, stages]``.

    After the first layer, the bound of the second and third comparison is the floor.
    """
    tokens = _tokens(runner, prompt)
    plain = _plain(runner, prompt, tokens)
    chunk = _chunk(runner, prompt, tokens)
    tree = _tree(runner, prompt, tokens, decoy=1)
    other = _tree(runner, prompt, tokens, decoy=2)
    by_stage = bounds(errors(plain, chunk), limits)
    first_layer = torch.zeros_like(by_stage)
    first_layer[0] = 1
    found = torch.stack([errors(plain, tree), errors(tree, other), errors(chunk, tree) * first_layer])
    bound = by_stage.expand_as(found).clone()
    bound[1, :, 0] = limits.floor
    bound[2] = limits.floor
    return found, bound


def _check_bits(runner: ModelRunner) -> None:
    tokens = _tokens(runner, 0)
    plain = _plain(runner, 0, tokens)
    for decoy in (1, 2):
        if not _tree(runner, 0, tokens, decoy).equals(plain):
            raise UnavailableError(
                "The parity check failed: with --deterministic, verifying a tree must yield the bits of "
                f"plain decoding, but the logits or a layer's output differ. {_fix(runner)}",
                reason="parity_check_failed",
            )


def _worst(found: torch.Tensor, bound: torch.Tensor, limits: Limits) -> Parity:
    place = int((found / bound).argmax())
    # `torch.unravel_index` would import sympy, which takes longer than the whole check.
    _comparisons, depths, stages = found.shape
    depth, stage = divmod(place % (depths * stages), stages)
    return Parity(float(found.flatten()[place]), float(bound.flatten()[place]), stage, depth, limits)


def _tokens(runner: ModelRunner, prompt: int) -> list[int]:
    """Return tokens that follow the prompt, one per row of a pass. If possible, all tokens are different.

    The model does not choose these tokens, because models with random weights tend to repeat one token. With
    equal tokens, a mask that wrongly hides an ancestor would hardly change the results.
    """
    vocab_size = runner.decoder.config.vocab_size
    return [(3 + 17 * index + 29 * prompt) % vocab_size for index in range(_NUM_NODES)]


def _plain(runner: ModelRunner, prompt: int, tokens: Seq[int]) -> Stages:
    """Decode the path's tokens one at a time. Return the rows of these tokens."""
    with _prefilled(runner, prompt) as lease:
        steps = [
            _run(runner, lease, _PROMPT_LEN + depth, [tokens[depth]], [_PROMPT_LEN + depth])
            for depth in range(TREE_DEPTH + 1)
        ]
    return Stages(torch.cat([step.layers for step in steps]), torch.cat([step.logits for step in steps]))


def _chunk(runner: ModelRunner, prompt: int, tokens: Seq[int]) -> Stages:
    """Run the tokens as a causal chunk with as many rows as the tree has nodes. Return the path's rows."""
    with _prefilled(runner, prompt) as lease:
        positions = range(_PROMPT_LEN, _PROMPT_LEN + _NUM_NODES)
        return _run(runner, lease, _PROMPT_LEN, tokens, positions).rows(list(range(TREE_DEPTH + 1)))


def _tree(runner: ModelRunner, prompt: int, tokens: Seq[int], decoy: int) -> Stages:
    """Verify a tree whose second child at every level is the path's token. Return the path's rows.

    Args:
        runner: The model and its memory.
        prompt: Number of the prompt.
        tokens: The path's tokens come first.
        decoy: Distance of each decoy's token from its sibling's token.
    """
    tree, parent = HostTree.of_root(tokens[0]), 0
    for token in tokens[1 : 1 + TREE_DEPTH]:
        tree.add((token + decoy) % runner.decoder.config.vocab_size, parent, 0.0)
        parent = tree.add(token, parent, 0.0)
    positions = [_PROMPT_LEN + depth for depth in tree.depths]
    ancestors = pad_trees([tree], runner.device).ancestors[0]
    with _prefilled(runner, prompt) as lease:
        return _run(runner, lease, _PROMPT_LEN, tree.tokens, positions, ancestors).rows(_PATH)


@contextmanager
def _prefilled(runner: ModelRunner, prompt: int) -> Iterator[PageLease]:
    """Lease pages with a prompt's K/V. Zero the pages afterwards, to reveal later reads of stale data."""
    sequence = trial_sequence(runner, prompt, _PROMPT_LEN)
    try:
        if FAILED_TOKEN in runner.prefill([PrefillChunk(sequence, 0, _PROMPT_LEN)]):
            raise _damaged()
        assert sequence.lease is not None
        yield sequence.lease
        runner.scrub(sequence)
    finally:
        release(sequence)


def _run(
    runner: ModelRunner,
    lease: PageLease,
    start: int,
    tokens: Seq[int],
    positions: Seq[int],
    ancestors: torch.Tensor | None = None,
) -> Stages:
    """Run one pass over rows of one sequence and return copies of its results."""
    decoder, pool, device = runner.decoder, runner.pool, runner.device
    runner.attention.plan(build_batch(pool, [lease], [start], [len(tokens)], ancestors=ancestors))
    output = decoder.forward(
        upload(tokens, torch.int64, device),
        upload(positions, torch.int64, device),
        runner.attention,
        pool,
        range(decoder.config.num_layers),
    )
    logits = decoder.logits(output.hidden).float()
    if not bool(logits.isfinite().all()):
        raise _damaged()
    assert output.aux is not None
    return Stages(output.aux.float().view(len(tokens), decoder.config.num_layers, -1), logits.clone())


def _damaged() -> UnavailableError:
    return UnavailableError(
        "The model's logits are NaN or infinite: the checkpoint is damaged.", reason="nan_logits"
    )


def _numbers(runner: ModelRunner, result: Parity) -> dict[str, object]:
    """Return the fields of a log line. `margin` is the bound divided by the error."""
    return {
        "error": f"{result.error:.2e}",
        "bound": f"{result.bound:.2e}",
        "margin": f"{result.bound / result.error:.3g}x" if result.error > 0 else "no error",
        "at": _place(runner, result.stage),
        "type": result.limits.name,
    }


def _place(runner: ModelRunner, stage: int) -> str:
    return "the logits" if stage == runner.decoder.config.num_layers else f"the output of layer {stage}"


def _fix(runner: ModelRunner) -> str:
    if isinstance(runner.attention, DeterministicAttention):
        return "Leave --deterministic out, and report the problem."
    if runner.pool.kv_dtype.itemsize == 1:
        return "Leave --kv-cache-dtype out, try --attention-backend reference, and report the problem."
    return "Try --attention-backend reference, and report the problem."
