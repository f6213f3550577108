"""The parity check at startup: verifying a tree must yield the logits of plain decoding, except for rounding.

The check computes given tokens in passes over prompt chunks of one token each, i.e. one at a time. These
passes are its reference for plain decoding. Then it verifies the same tokens as one path of a tree. The other
nodes of the tree are decoys, which must not change the results of the path.

The tree is verified as in a round of requests: with the same code, in the engine's own slots, and beside
another sequence that decodes plainly (`trial_rounds.py`). The result of this other sequence is compared too,
and so is that of a round without a tree.

The check compares logits instead of chosen tokens, because rounding may decide between nearly equal logits.
It also compares the residual stream after every layer. Rounding errors grow from layer to layer, so they may
hide a fault in the logits.

A *stage* is the residual stream after a layer, or the logits. For every node of the path, the check makes
three comparisons:

1. At every stage, it compares the tree with plain decoding.
2. At every stage, it compares the tree with a second tree that differs only in its decoys. The passes over
   these two trees usually round in the same way.
3. After the first layer, it compares the tree with a causal chunk. Both passes have equal numbers of rows. Up
   to this stage, only attention may round differently in the two passes.

`rounding_bounds.py` defines a bound for each error. The error of a correct model may exceed its bound with
one prompt, for example if rounding selects another expert. A fault causes an error above the bound with every
prompt. The check therefore stops the start only if the same row exceeds its bound at the same stage with each
of several prompts.

With deterministic kernels, all passes must yield equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.startup.rounding_bounds import Limits, Stages, bounds, errors, limits_of
from outrider.services.target.startup.trial_rounds import TrialRounds
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.base.errors import UnavailableError
from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.trees import HostTree

TREE_DEPTH = 6
"""Depth of the tree, unless the engine's rounds are too small for it."""
PROMPTS = 3
PROMPTS_OF_EXPERTS = 5
"""Number of prompts to try before a mixture of experts is refused. For all other models, it is `PROMPTS`."""
_PROMPT_LEN = 4
"""Number of tokens of a prompt. With a short prompt, each ancestor of a node has much weight in attention.

Prompt and tree together still need more than one page of 16 tokens.
"""

_log = get_logger("outrider.target")


@dataclass(frozen=True, slots=True)
class Parity:
    """Result of the parity check between the verification of a tree and plain decoding.

    Attributes:
        error: The error with the largest ratio to its bound, among all errors of the check.
        bound: The bound of `error`.
        stage: Stage of `error`: the index of a layer, or the number of layers if the stage is the logits.
        depth: Depth of the tree node with this error. None for a sequence without a tree.
        limits: The limits for the model's data types.
    """

    error: float
    bound: float
    stage: int
    depth: int | None
    limits: Limits

    @property
    def passed(self) -> bool:
        """True if the error is at most its bound, so that rounding can be its cause."""
        return self.error <= self.bound


@dataclass(frozen=True, slots=True)
class _Passes:
    """Results of the passes over one prompt. All have the same rows.

    The first rows are the nodes of the path. They are followed by the node that a sequence without a tree
    decodes, beside a tree and in a round of its own. This node is the last one of the path.

    Attributes:
        plain: The reference: tokens one at a time.
        chunk: A causal chunk of a prompt.
        tree: A round with a tree, and a round without trees.
        other: The same rounds, with other decoys in the tree.
        nodes: Number of nodes of the path.
    """

    plain: Stages
    chunk: Stages
    tree: Stages
    other: Stages
    nodes: int


@torch.inference_mode()
def check_parity(runner: ModelRunner, step_runner: StepRunner) -> Parity | None:
    """Check that verifying a tree yields the logits of plain decoding, and log the margin.

    Args:
        runner: The model and its memory.
        step_runner: The slots and the packed rows of the engine. No request may be live.

    Returns:
        The error with the largest ratio to its bound. With deterministic kernels, the check requires equal
        bits and returns None.

    Raises:
        UnavailableError: The logits or a layer's output differ by more than rounding can explain, or logits
            are NaN or infinite. The process must not serve.
        OutriderError: The KV cache is too small.
    """
    if isinstance(runner.attention, DeterministicAttention):
        passes = _run(runner, step_runner, 0)
        if not (passes.tree.equals(passes.plain) and passes.other.equals(passes.plain)):
            raise UnavailableError(
                "The parity check failed: with --deterministic, verifying a tree must yield the bits of "
                f"plain decoding, but the logits or a layer's output differ. {_fix(runner)}",
                reason="parity_check_failed",
            )
        _log.info("parity check", bits="equal")
        return None
    limits = limits_of(runner.decoder, runner.pool)
    passes = _run(runner, step_runner, 0)
    found, bound = _compare(passes, limits)
    result = _worst(found, bound, limits, passes.nodes)
    for prompt in range(1, PROMPTS_OF_EXPERTS if limits.may_route else PROMPTS):
        if result.passed:
            break
        _log.warning("parity check exceeds its bound", prompts=prompt, **_numbers(runner, result))
        more, its_bound = _compare(_run(runner, step_runner, prompt), limits)
        better = more / its_bound < found / bound
        found, bound = torch.where(better, more, found), torch.where(better, its_bound, bound)
        result = _worst(found, bound, limits, passes.nodes)
    if not result.passed:
        row = "a sequence without a tree" if result.depth is None else f"a node of depth {result.depth}"
        raise UnavailableError(
            f"The parity check failed: verifying a tree changes {_place(runner, result.stage)} of {row} by "
            f"{result.error:.2%}, compared with plain decoding. Rounding in {limits.name} explains at most "
            f"{result.bound:.2%}. {_fix(runner)}",
            reason="parity_check_failed",
        )
    _log.info("parity check", **_numbers(runner, result))
    return result


def _compare(passes: _Passes, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors of the three comparisons and their bounds, both ``[comparisons, rows, stages]``.

    After the first layer, the bound of the second and third comparison is the floor.
    """
    plain, chunk, tree = passes.plain, passes.chunk, passes.tree
    of_chunk = errors(plain, chunk)
    by_stage = bounds(of_chunk[: passes.nodes], limits)
    # Up to the first layer's attention, the chunk and the path compute the same rows. A sequence without a
    # tree reads K/V of other passes.
    first_layer = torch.zeros_like(of_chunk)
    first_layer[: passes.nodes, 0] = 1
    found = torch.stack([errors(plain, tree), errors(tree, passes.other), errors(chunk, tree) * first_layer])
    bound = by_stage.expand_as(found).clone()
    bound[1, :, 0] = limits.floor
    bound[2] = limits.floor
    return found, bound


def _worst(found: torch.Tensor, bound: torch.Tensor, limits: Limits, nodes: int) -> Parity:
    place = int((found / bound).argmax())
    # `torch.unravel_index` would import sympy, which takes longer than the whole check.
    _comparisons, rows, stages = found.shape
    row, stage = divmod(place % (rows * stages), stages)
    depth = row if row < nodes else None
    return Parity(float(found.flatten()[place]), float(bound.flatten()[place]), stage, depth, limits)


def _run(runner: ModelRunner, step_runner: StepRunner, prompt: int) -> _Passes:
    """Run all passes over a prompt."""
    rounds, last_slot = TrialRounds(runner, step_runner), step_runner.table.slots - 1
    # Rounds have room for a second sequence and for the whole tree, unless the engine's limits are very low.
    beside = int(last_slot > 0 and step_runner.max_rows > 1)
    depth = min(TREE_DEPTH, (step_runner.max_rows - 1 - beside) // 2)
    tokens = _tokens(runner, prompt, rounds.padded_rows(beside + 1 + 2 * depth))
    # 1. Run the passes of prompts.
    with rounds.prefilled(prompt, _PROMPT_LEN, last_slot) as sequence:
        chunk = rounds.chunk(sequence, _PROMPT_LEN, tokens)
    with rounds.prefilled(prompt, _PROMPT_LEN, 0) as sequence:
        steps = [rounds.chunk(sequence, _PROMPT_LEN + at, [tokens[at]]) for at in range(depth + 1)]
        # 2. Decode the last token again, in a round of its own and beside trees.
        sequence.tokens.extend(tokens[:depth])
        decoding = [(sequence, HostTree.of_root(tokens[depth]))]
        alone = rounds.round(decoding)
        trees = []
        for decoy in (1, 2):
            with rounds.prefilled(prompt, _PROMPT_LEN, last_slot) as drafting:
                tree = _tree(runner, tokens[: depth + 1], decoy)
                mixed = rounds.round([*decoding[:beside], (drafting, tree)])
            path = [beside + 2 * at for at in range(depth + 1)]
            trees.append(Stages.joined([mixed.rows([*path, *range(beside)]), alone]))
    same_rows = [*range(depth + 1), *[depth] * (beside + 1)]
    plain = Stages.joined(steps).rows(same_rows)
    return _Passes(plain, chunk.rows(same_rows), trees[0], trees[1], depth + 1)


def _tokens(runner: ModelRunner, prompt: int, count: int) -> list[int]:
    """Return tokens that follow the prompt, one per row of a pass. If possible, all tokens are different.

    The model does not choose these tokens, because models with random weights tend to repeat one token. With
    equal tokens, a mask that wrongly hides an ancestor would hardly change the results.
    """
    vocab_size = runner.decoder.config.vocab_size
    return [(3 + 17 * index + 29 * prompt) % vocab_size for index in range(count)]


def _tree(runner: ModelRunner, path: Seq[int], decoy: int) -> HostTree:
    """Return a tree with two children at every level. The second child is on the path, the first is a decoy.

    Args:
        runner: Knows the size of the vocabulary.
        path: Tokens of the path.
        decoy: Distance of each decoy's token from its sibling's token.
    """
    tree, parent = HostTree.of_root(path[0]), 0
    for token in path[1:]:
        tree.add((token + decoy) % runner.decoder.config.vocab_size, parent, 0.0)
        parent = tree.add(token, parent, 0.0)
    return tree


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
