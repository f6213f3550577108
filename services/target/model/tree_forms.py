"""Fits the drafted trees of a round to constrained outputs, and finds the tokens allowed after each node.

The *form* of an output determines which tokens may come next, for example those that fit a JSON schema. Nodes
that the form forbids are removed before the trees are verified. The rows that become free are filled with
text that the form forces, such as the names of a JSON schema's properties. They are also filled with the
tokens of short lists, such as the values of an enum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.kernels.packed_round import pack_trees
from outrider.services.target.grammar.fill import fill_all
from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.matcher import Mask, token_mask_words
from outrider.services.target.model.mask_buffer import MaskBuffer
from outrider.services.target.model.packed_batch import Entry, PackedBatch
from outrider.services.target.model.tree_fit import children_of, fitted
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.kv.upload import upload
from outrider.shared.spec.trees import HostTree, pad_trees

MOST_FITTED = 64
"""Total number of nodes up to which all trees of a round are fitted before the forward pass.

The device is idle while trees are fitted. In larger rounds, a tree is fitted only if the form forces the text
after its root. In the other trees, the masks exclude the forbidden nodes."""


@dataclass(slots=True)
class FormedEntry:
    """An entry of a round whose output has a form, i.e. a constraint on its tokens.

    Attributes:
        index: Index of the entry in the round.
        form: The form, which has followed all tokens of the output.
        start: Index of the first packed row of the entry.
        tree: The drafted tree of the entry. None until it is read.
        known: Masks of the tokens that the form allows after nodes of the tree, as far as they are known.
    """

    index: int
    form: OutputForm
    start: int
    tree: HostTree | None = None
    known: dict[int, Mask] = field(default_factory=dict)


class TreeForms:
    """Fits trees and makes masks. Engine thread only, under inference mode.

    Args:
        batch: The packed trees of the newest round, on the device. Each round overwrites them.
        vocab_size: Size of the vocabulary.
    """

    def __init__(self, batch: PackedBatch, vocab_size: int) -> None:
        self._batch = batch
        self._words = token_mask_words(vocab_size)
        self._buffer: MaskBuffer | None = None
        self._fetched: FetchedTrees | None = None

    def allocate(self) -> MaskBuffer:
        """Allocate the masks unless they exist. Servers without constrained outputs need no masks."""
        if self._buffer is None:
            self._buffer = MaskBuffer(self._batch.rows, self._words, self._batch.nodes.device)
        return self._buffer

    def masks(self, rows: int) -> torch.Tensor:
        """Return the masks of a round, ``[rows, words] int32`` on the device. They never move."""
        return self.allocate().on_device(rows)

    def fetch(self) -> None:
        """Enqueue the copy of the trees of a round to the host. The drafting must have been enqueued."""
        if self._fetched is None:
            self._fetched = FetchedTrees(self._batch)
        self._fetched.fetch()

    def fit(self, entries: Seq[Entry], starts: Seq[int]) -> list[FormedEntry]:
        """Remove from each drafted tree the tokens that the form (constraint) of its sequence forbids.

        If trees were drafted, call `fetch` first. The host must have read all earlier rounds.

        Args:
            entries: The entries of the round.
            starts: Index of the first packed row of each entry.

        Returns:
            All entries with a form, except for sequences that have ended.
        """
        formed: list[FormedEntry] = []
        for index, entry in enumerate(entries):
            sequence = entry.sequence
            if sequence.form is None or entry.void or sequence.remaining <= 0:
                continue
            one = FormedEntry(index, settled_form(sequence), starts[index])
            if not entry.shape.drafts:
                one.tree = HostTree.of_root(sequence.tokens[-1])
            formed.append(one)
        drafted = [one for one in formed if one.tree is None]
        self._find_roots(drafted)
        if sum(entries[one.index].rows for one in drafted) > MOST_FITTED:
            drafted = [one for one in drafted if one.form.forced()]
        changed: dict[int, HostTree] = {}
        for one in drafted:
            entry, tree = entries[one.index], self._tree_of(one)
            one.tree = fitted(one.form, tree, entry.rows, entry.columns - 1, one.known)
            if one.tree != tree:
                changed[one.index] = one.tree
        if changed:
            self._write(changed)
        return formed

    def fill(self, formed: Seq[FormedEntry]) -> None:
        """Find the allowed tokens after each tree node of the round, and enqueue their copy to the device.

        Call this method after the forward pass has been enqueued, so that the device is busy meanwhile.
        """
        masks = self.allocate()
        masks.clear()
        work: list[tuple[OutputForm, Mask]] = []
        for one in formed:
            tree = one.tree or self._tree_of(one)
            rows = masks.rows(one.start, one.start + len(tree.tokens))
            for node, mask in one.known.items():
                rows[node] = mask
            nodes = [node for node in range(len(rows)) if node not in one.known]
            work += [(form, rows[node]) for form, node in forms_at(one.form, tree, nodes)]
        fill_all(work)
        masks.upload()

    def _find_roots(self, drafted: Seq[FormedEntry]) -> None:
        """Find the masks of the roots of drafted trees, while the device still drafts.

        Where any text may follow a root, fitting needs no mask. `fill` finds it during the forward pass.
        """
        drafted = [one for one in drafted if not one.form.takes_text()]
        found = np.zeros((len(drafted), self._words), dtype=np.int32)
        fill_all([(one.form, mask) for one, mask in zip(drafted, found, strict=True)])
        for one, mask in zip(drafted, found, strict=True):
            one.known[0] = mask

    def _tree_of(self, one: FormedEntry) -> HostTree:
        assert self._fetched is not None, "drafted trees are fetched"
        return self._fetched.tree(one.index, one.start)

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


class FetchedTrees:
    """The drafted trees of the newest round, in host memory.

    Args:
        batch: The packed trees of the newest round, on the device. Each round overwrites them.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch
        self._copied: torch.cuda.Event | None = None
        self._lists: tuple[list[list[int]], list[float], list[int]] | None = None
        pinned = batch.nodes.is_cuda
        with torch.inference_mode(False):
            self._nodes = torch.zeros(batch.nodes.shape, dtype=torch.int32, pin_memory=pinned)
            self._counts = torch.zeros(batch.rows, dtype=torch.int32, pin_memory=pinned)

    def fetch(self) -> None:
        """Enqueue the copy to the host."""
        self._nodes.copy_(self._batch.nodes, non_blocking=True)
        self._counts.copy_(self._batch.trees(self._batch.rows).num_nodes, non_blocking=True)
        self._lists = None
        if self._batch.nodes.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def tree(self, index: int, start: int) -> HostTree:
        """Return the drafted tree of an entry. Wait until it has been drafted and copied to the host.

        Args:
            index: Index of the entry in the round.
            start: Index of the first packed row of the entry.
        """
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if self._lists is None:
            numbers, logprobs = self._nodes[:2].tolist(), self._nodes[3].view(torch.float32).tolist()
            self._lists = numbers, logprobs, self._counts.tolist()
        (tokens, parents), logprobs, counts = self._lists
        tree = HostTree.of_root(tokens[start])
        for row in range(start + 1, start + counts[index]):
            tree.add(tokens[row], parents[row], logprobs[row])
        return tree


def settled_form(sequence: Sequence) -> OutputForm:
    """Return the form of a sequence's output, after it has followed all tokens of the output."""
    assert sequence.form is not None, "only sequences with a form are asked"
    sequence.form.settle(sequence.tokens[sequence.prompt_len :])
    return sequence.form


def prompt_masks(sequences: Seq[Sequence], device: torch.device) -> torch.Tensor:
    """Return the masks of allowed tokens for the first token after each prompt.

    Args:
        sequences: Sequences whose tokens are all known to the host. The output of at least one is
            constrained.
        device: Device of the masks.

    Returns:
        ``[len(sequences), words] int32``, one bit per token.
    """
    words = max(token_mask_words(one.form.vocab_size) for one in sequences if one.form is not None)
    masks = np.full((len(sequences), words), -1, dtype=np.int32)
    for mask, sequence in zip(masks, sequences, strict=True):
        if sequence.form is not None:
            settled_form(sequence).fill(mask)
    return upload(masks.reshape(-1), torch.int32, device).view(masks.shape)


def forms_at(form: OutputForm, tree: HostTree, nodes: Collection[int]) -> Iterator[tuple[OutputForm, int]]:
    """Yield forms that have followed the path to some nodes of a tree, each with its node.

    They are copies of the given form, except that the root gets the form itself, which remembers what it has
    computed. Use the forms after the last one.

    Nodes that the form forbids, nodes whose tokens end the output, and nodes below these are left out.
    Forbidden nodes are never accepted, and tokens after the end of the output are dropped.

    Args:
        form: The form of the output, i.e. the constraint on its tokens. It has followed the root.
        tree: The tree.
        nodes: The wanted nodes.
    """
    children = children_of(tree)
    passed: set[int] = set()  # the nodes on the way to the wanted ones
    for node in nodes:
        while node >= 0 and node not in passed:
            passed.add(node)
            node = tree.parents[node]

    def visit(node: int) -> Iterator[tuple[OutputForm, int]]:
        if node in nodes:
            yield (form.fork() if node else form), node
        for child in children[node]:
            token = tree.tokens[child]
            if child in passed and token not in form.ends and form.accept(token):
                yield from visit(child)
                form.rollback()

    return visit(0)
