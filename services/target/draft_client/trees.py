"""Trees that a remote draft sent: checked before they are believed, then padded into a batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.spec.tree import MASK_WORD_BITS, DraftBatch, DraftShape, mask_words

WORD_BYTES = MASK_WORD_BITS // 8


@dataclass(frozen=True, slots=True)
class CheckedTree:
    """A tree with its root as node 0. `masks[i]` has a bit for every ancestor of node i and for itself."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    masks: list[int]
    logprobs: list[float]


def root_tree(root_token: int) -> CheckedTree:
    """Return the tree that holds the root alone."""
    return CheckedTree([root_token], [-1], [0], [1], [0.0])


def check_tree(tree: draft_pb2.Tree, root_token: int, shape: DraftShape, vocab_size: int) -> CheckedTree:
    """Return the tree with its root, depths and masks.

    Raises:
        ProtocolError: A parent does not precede its child, a token is not in the vocabulary, or the tree is larger than asked for.
    """
    count = len(tree.token_ids)
    if len(tree.parents) != count:
        raise ProtocolError(f"a tree of {count} tokens names {len(tree.parents)} parents", field="parents")
    if count >= shape.max_nodes:
        raise ProtocolError(
            f"a tree of {count + 1} nodes; at most {shape.max_nodes} were asked for", field="token_ids"
        )
    tokens, parents, depths, masks = [root_token], [-1], [0], [1]
    for index, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True), 1):
        if token >= vocab_size:
            raise ProtocolError(f"token {token} is not in the vocabulary of {vocab_size}", field="token_ids")
        if parent >= index:
            raise ProtocolError(f"node {index} names node {parent} as its parent", field="parents")
        depth = depths[parent] + 1
        if depth > shape.depth:
            raise ProtocolError(f"a tree deeper than the {shape.depth} levels asked for", field="parents")
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        masks.append(masks[parent] | 1 << index)
    logprobs = [0.0, *tree.logprobs] if len(tree.logprobs) == count else [0.0] * (count + 1)
    return CheckedTree(tokens, parents, depths, masks, logprobs)


def fits(shape: DraftShape, hello: draft_pb2.HelloAck) -> bool:
    """Whether the draft that said hello makes trees of this shape."""
    caps = ((shape.depth, hello.max_steps), (shape.topk, hello.max_topk), (shape.max_nodes, hello.max_nodes))
    return all(not cap or value <= cap for value, cap in caps)


def pad_trees(trees: Sequence[CheckedTree], device: torch.device, draft_ms: float) -> DraftBatch:
    """Return the trees as one batch, each padded to the largest. All fields go to the device in one copy."""
    bs, width = len(trees), max(len(tree.tokens) for tree in trees)
    words = mask_words(width)
    packed = array("i")
    for rows, fill in (
        ([tree.tokens for tree in trees], 0),
        ([tree.parents for tree in trees], -1),
        ([tree.depths for tree in trees], 0),
    ):
        for row in rows:
            packed.extend(row)
            packed.extend([fill] * (width - len(row)))
    packed.extend([len(tree.tokens) for tree in trees])
    for tree in trees:
        for mask in tree.masks:
            packed.frombytes(mask.to_bytes(words * WORD_BYTES, "little"))
        packed.extend([0] * (words * (width - len(tree.masks))))
    for tree in trees:
        packed.frombytes(array("f", tree.logprobs).tobytes())
        packed.extend([0] * (width - len(tree.logprobs)))
    nodes = bs * width
    fields = (
        torch.frombuffer(packed, dtype=torch.int32)
        .to(device)
        .split_with_sizes([nodes, nodes, nodes, bs, nodes * words, nodes])
    )
    return DraftBatch(
        tokens=fields[0].view(bs, width),
        parents=fields[1].view(bs, width),
        depths=fields[2].view(bs, width),
        num_nodes=fields[3],
        ancestors=fields[4].view(bs, width, words),
        logprobs=fields[5].view(torch.float32).view(bs, width),
        draft_ms=draft_ms,
    )
