"""Checks the trees that a remote draft sends: parents, depth, size and vocabulary."""

from __future__ import annotations

from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.spec.tree import DraftShape
from outrider.shared.spec.trees import HostTree


def check_tree(tree: draft_pb2.Tree, root_token: int, shape: DraftShape, vocab_size: int) -> HostTree:
    """Check a tree that the draft service proposed, and return it with its root, depths and ancestor masks.

    Raises:
        ProtocolError: A parent does not precede its child, a token is outside the vocabulary, or the tree is
            larger than requested.
    """
    count = len(tree.token_ids)
    if len(tree.parents) != count:
        raise ProtocolError(f"the tree has {count} tokens but {len(tree.parents)} parents", field="parents")
    if count >= shape.max_nodes:
        raise ProtocolError(
            f"the tree has {count + 1} nodes; at most {shape.max_nodes} were requested", field="token_ids"
        )
    tokens, parents, depths, masks = [root_token], [-1], [0], [1]
    for index, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True), 1):
        if token >= vocab_size:
            raise ProtocolError(f"token {token} is outside the vocabulary of {vocab_size}", field="token_ids")
        if parent >= index:
            raise ProtocolError(
                f"the parent of node {index} is node {parent}, which does not precede it", field="parents"
            )
        depth = depths[parent] + 1
        if depth > shape.depth:
            raise ProtocolError(
                f"the tree is deeper than the {shape.depth} levels that were requested", field="parents"
            )
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        masks.append(masks[parent] | 1 << index)
    logprobs = [0.0, *tree.logprobs] if len(tree.logprobs) == count else [0.0] * (count + 1)
    return HostTree(tokens, parents, depths, logprobs, masks)


def draft_can_grow(shape: DraftShape, hello: draft_pb2.HelloAck) -> bool:
    """Return True if the draft can make trees of this shape, according to the draft's HelloAck."""
    caps = ((shape.depth, hello.max_steps), (shape.topk, hello.max_topk), (shape.max_nodes, hello.max_nodes))
    return all(not cap or value <= cap for value, cap in caps)
