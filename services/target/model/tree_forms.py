"""Fits the drafted trees of a round to constrained outputs, and finds the tokens allowed after each node.

The *form* of an output determines which tokens may come next, for example those that fit a JSON schema. Nodes
that the form forbids are removed before the trees are verified. The rows that become free are filled with
text that the form forces, such as the names of a JSON schema's properties.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from outrider.kernels.packed_round import pack_trees
from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.matcher import Mask, words_of
from outrider.services.target.model.mask_buffer import MaskBuffer
from outrider.services.target.model.packed_batch import Entry, PackedBatch
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.kv.upload import upload
from outrider.shared.spec.trees import HostTree, pad_trees


@dataclass(frozen=True, slots=True)
class FittedTree:
    """The tree of an entry whose output has a form.

    Attributes:
        form: The form, which has followed all tokens of the output.
        tree: The tree without nodes that the form forbids.
        start: First packed row of the entry.
    """

    form: OutputForm
    tree: HostTree
    start: int


class TreeForms:
    """Fits trees and makes masks. Engine thread only, under inference mode.

    Args:
        batch: The packed trees of the rounds.
        vocab_size: Size of the vocabulary.
    """

    def __init__(self, batch: PackedBatch, vocab_size: int) -> None:
        self._batch = batch
        self._words = words_of(vocab_size)
        self._buffer: MaskBuffer | None = None

    def allocate(self) -> MaskBuffer:
        """Allocate the masks unless they exist. Servers without constrained outputs need no masks."""
        if self._buffer is None:
            self._buffer = MaskBuffer(self._batch.rows, self._words, self._batch.nodes.device)
        return self._buffer

    def masks(self, rows: int) -> torch.Tensor:
        """Return the masks of a round, ``[rows, words] int32`` on the device. They never move."""
        return self.allocate().on_device(rows)

    def fit(self, entries: Seq[Entry], starts: Seq[int]) -> list[FittedTree]:
        """Fit the trees of a round to the forms of their outputs.

        The drafting of this round must have been enqueued, and the host must have read all earlier rounds.

        Args:
            entries: The entries of the round.
            starts: First packed row of each entry.

        Returns:
            The trees of all entries with a form, except for sequences that have ended.
        """
        formed = [
            index
            for index, entry in enumerate(entries)
            if entry.sequence.form is not None and not entry.void and entry.sequence.remaining > 0
        ]
        drafted = [index for index in formed if entries[index].shape.drafts]
        trees = self._read(entries, starts, drafted) if drafted else {}
        fits: list[FittedTree] = []
        for index in formed:
            sequence, entry = entries[index].sequence, entries[index]
            form = settled_form(sequence)
            tree = trees.get(index)
            if tree is None:
                tree = HostTree.of_root(sequence.tokens[-1])
            else:
                tree = trees[index] = fitted(form, tree, entry.rows, entry.columns - 1)
            fits.append(FittedTree(form, tree, starts[index]))
        if trees:
            self._write(trees)
        return fits

    def fill(self, fits: Seq[FittedTree]) -> None:
        """Find the allowed tokens of all nodes, and enqueue their copy to the device.

        Call this once the forward pass has been enqueued, so that the device is busy meanwhile.
        """
        masks = self.allocate()
        masks.clear()
        for fit in fits:
            fill_masks(fit.form, fit.tree, masks.rows(fit.start, fit.start + len(fit.tree.tokens)))
        masks.upload()

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


def fitted(form: OutputForm, tree: HostTree, rows: int, depth: int) -> HostTree:
    """Return a tree without the nodes that a form forbids, and with nodes for text that the form forces.

    Nodes whose tokens end the output are removed too, because nothing can follow them.

    Args:
        form: The form of the output, after it has followed the root.
        tree: The drafted tree.
        rows: Largest number of nodes.
        depth: Largest depth of a node.
    """
    kept = HostTree.of_root(tree.tokens[0])
    children = _children(tree)
    grafts: list[tuple[int, int, list[int]]] = []

    def visit(node: int, place: int) -> None:
        if forced := form.forced():
            grafts.append((kept.depths[place], place, forced))
        for child in children[node]:
            if tree.tokens[child] not in form.ends and form.accept(tree.tokens[child]):
                visit(child, kept.add(tree.tokens[child], place, tree.logprobs[child]))
                form.rollback()

    visit(0, 0)
    for _, place, forced in sorted(grafts):
        _graft(kept, place, [token for token in forced if token not in form.ends], rows, depth)
    return kept


def _graft(tree: HostTree, place: int, tokens: Seq[int], rows: int, depth: int) -> None:
    """Add a path of tokens below a node, as far as there is room. Reuse existing nodes on this path."""
    for token in tokens:
        found = next(
            (
                node
                for node, parent in enumerate(tree.parents)
                if parent == place and tree.tokens[node] == token
            ),
            None,
        )
        if found is None:
            if len(tree.tokens) >= rows or tree.depths[place] >= depth:
                return
            found = tree.add(token, place, 0.0)
        place = found


def fill_masks(form: OutputForm, tree: HostTree, masks: Mask) -> None:
    """Write the allowed tokens after every node of a tree.

    Args:
        form: The form of the output, after it has followed the root.
        tree: A tree from `fitted`.
        masks: ``[nodes, words] int32``.
    """
    children = _children(tree)

    def visit(node: int) -> None:
        form.fill(masks[node])
        for child in children[node]:
            if form.accept(tree.tokens[child]):
                visit(child)
                form.rollback()
            else:  # text that `forced` returned although the form does not allow it
                masks[child].fill(0)

    visit(0)


def _children(tree: HostTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            children[parent].append(node)
    return children
