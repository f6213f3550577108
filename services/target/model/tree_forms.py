"""Fits the drafted trees of a round to constrained outputs, and finds the tokens allowed after each node.

The *form* of an output determines which tokens may come next, for example those that fit a JSON schema. Nodes
that the form forbids are removed before the trees are verified. The rows that become free are filled with
text that the form forces, such as the names of a JSON schema's properties, and with the tokens of short
lists, such as the values of an enum.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from outrider.kernels.packed_round import pack_trees
from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.matcher import Mask, words_of
from outrider.services.target.model.packed_batch import Entry, PackedBatch
from outrider.services.target.model.tree_fit import children_of, fitted
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.kv.upload import upload
from outrider.shared.spec.trees import HostTree, pad_trees

Masks = Callable[[], torch.Tensor]
"""Returns the masks of a round, ``[rows, words] int32`` on the device.

The host finds the allowed tokens in this call, while the device runs the forward pass.
"""


class TreeForms:
    """Fits trees and makes masks. Engine thread only, under inference mode.

    Args:
        batch: The packed trees of the rounds.
        vocab_size: Size of the vocabulary.
    """

    def __init__(self, batch: PackedBatch, vocab_size: int) -> None:
        self._batch = batch
        self._words = words_of(vocab_size)

    def fit(self, entries: Seq[Entry], starts: Seq[int], rows: int) -> Masks | None:
        """Fit the trees of a round to the forms of their outputs.

        The drafting of this round must have been enqueued, and the host must have read all earlier rounds.

        Args:
            entries: The entries of the round.
            starts: First packed row of each entry.
            rows: Number of packed rows.

        Returns:
            A function that makes the masks of the fitted trees. None if no output has a form.
        """
        formed = [index for index, entry in enumerate(entries) if entry.sequence.form is not None]
        if not formed:
            return None
        drafted = [index for index in formed if entries[index].shape.drafts]
        trees = self._read(entries, starts, drafted) if drafted else {}
        visits: list[tuple[OutputForm, HostTree, int]] = []
        for index in formed:
            sequence, entry = entries[index].sequence, entries[index]
            form = settled_form(sequence)
            tree = trees.get(index)
            if tree is None:
                tree = HostTree.of_root(sequence.tokens[-1])
            else:
                tree = trees[index] = fitted(form, tree, entry.rows, entry.columns - 1)
            visits.append((form, tree, starts[index]))
        if trees:
            self._write(trees)
        return lambda: self._masks(visits, rows)

    def _read(self, entries: Seq[Entry], starts: Seq[int], drafted: Seq[int]) -> dict[int, HostTree]:
        """Copy trees to the host, and wait until they have been drafted."""
        batch = self._batch
        last = drafted[-1]
        nodes = batch.nodes[:, : starts[last] + entries[last].rows].cpu()
        counts = batch.trees(batch.rows).num_nodes[: last + 1].tolist()
        trees = {}
        for index in drafted:
            part = nodes[:, starts[index] : starts[index] + counts[index]]
            tokens, parents, _ = part[:3].tolist()
            logprobs = part[3].view(torch.float32).tolist()
            tree = trees[index] = HostTree.of_root(tokens[0])
            for token, parent, logprob in zip(tokens[1:], parents[1:], logprobs[1:], strict=True):
                tree.add(token, parent, logprob)
        return trees

    def _write(self, trees: dict[int, HostTree]) -> None:
        """Replace the packed trees of some entries."""
        batch, device = self._batch, self._batch.nodes.device
        packed = pad_trees(list(trees.values()), device)
        pack_trees(
            packed.tokens,
            packed.parents,
            packed.depths,
            packed.ancestors,
            packed.num_nodes,
            packed.logprobs,
            upload(list(trees), torch.int32, device),
            batch.entries(batch.rows),
            batch.trees(batch.rows),
        )

    def _masks(self, visits: Seq[tuple[OutputForm, HostTree, int]], rows: int) -> torch.Tensor:
        masks = np.full((rows, self._words), -1, dtype=np.int32)
        for form, tree, start in visits:
            fill_masks(form, tree, masks[start : start + len(tree.tokens)])
        flat = upload(masks.reshape(-1), torch.int32, self._batch.nodes.device)
        return flat.view(rows, self._words)


def settled_form(sequence: Sequence) -> OutputForm:
    """Return the form of a sequence's output, after it has followed all tokens of the output."""
    assert sequence.form is not None, "only sequences with a form are asked"
    sequence.form.settle(sequence.tokens[sequence.prompt_len :])
    return sequence.form


def prompt_masks(sequences: Seq[Sequence], device: torch.device) -> torch.Tensor:
    """Return the masks of the first token after each prompt.

    Args:
        sequences: Sequences whose tokens are all known to the host. At least one has a form.
        device: Device of the masks.

    Returns:
        ``[len(sequences), words] int32``.
    """
    words = max(words_of(one.form.vocab_size) for one in sequences if one.form is not None)
    masks = np.full((len(sequences), words), -1, dtype=np.int32)
    for mask, sequence in zip(masks, sequences, strict=True):
        if sequence.form is not None:
            settled_form(sequence).fill(mask)
    return upload(masks.reshape(-1), torch.int32, device).view(masks.shape)


def fill_masks(form: OutputForm, tree: HostTree, masks: Mask) -> None:
    """Write the allowed tokens after every node of a tree.

    Args:
        form: The form of the output, after it has followed the root.
        tree: A tree from `tree_fit.fitted`.
        masks: ``[nodes, words] int32``.
    """
    children = children_of(tree)

    def visit(node: int) -> None:
        form.fill(masks[node])
        for child in children[node]:
            if form.accept(tree.tokens[child]):
                visit(child)
                form.rollback()
            else:  # text that `forced` returned although the form does not allow it
                masks[child].fill(0)

    visit(0)
