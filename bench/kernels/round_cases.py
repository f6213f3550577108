"""Cases of `outrider bench kernels` for rounds: draft growth, verification, exchange between processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from outrider.bench.kernels.case import EPS, KernelCase, KernelOptions, over, small_kernel
from outrider.bench.kernels.inputs import KernelSizes, chain_inputs, copies_for, trees
from outrider.bench.measure.floors import Work
from outrider.kernels.add_norm import add_sums
from outrider.kernels.head_input import feature_input, head_input
from outrider.kernels.peer_words import Mail, box_shape, receive_words, send_words
from outrider.kernels.post_round import post_round
from outrider.kernels.round_plan import round_plan
from outrider.kernels.round_trade import admit_counts, fetch_blob, pack_trees, post_blob
from outrider.kernels.skinny_gemm import project_normed
from outrider.kernels.synthetic_acceptance import synthetic_acceptance
from outrider.kernels.topk_expand import Beam, Candidates, expand_level, select_beam, topk_expand
from outrider.kernels.tree_build import tree_build
from outrider.kernels.tree_check import tree_check
from outrider.kernels.verify import verify_tree

PATIENCE = 1000
"""Maximum number of polls for a message. In these cases, the message has already arrived."""
PLACES = 4
"""Number of slots in the ring to which results are posted."""
ROUND_NUMBER = 7


def draft_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the kernels that grow a draft tree, and the kernels that verify it."""
    embedding, norms = (
        sizes.random(sizes.draft_vocab, sizes.hidden),
        (sizes.random(sizes.hidden), sizes.random(sizes.hidden)),
    )
    for batch in sizes.batches:
        rows = batch * sizes.topk
        logits, scores = sizes.random(rows, sizes.draft_vocab), torch.zeros(rows, device=sizes.device)
        copies = copies_for(logits.nbytes, options.small)
        many = [logits.clone() for _ in range(copies)]
        read = Work(logits.nbytes, 0.0)
        yield KernelCase(
            f"topk_expand, {rows} rows of {sizes.draft_vocab}",
            over(many, partial(_expand, scores, sizes.topk)),
            read,
            copies,
        )
        candidates = Candidates.make(batch, sizes.steps, sizes.topk, sizes.device)
        words = -(-sizes.steps * sizes.topk // 32)
        beam = expand_level(
            sizes.random(batch, sizes.draft_vocab), None, 0, sizes.topk, candidates, words=words, last=False
        )
        level = partial(_level, beam, sizes.topk, candidates, words)
        yield KernelCase(f"expand_level, {rows} rows of {sizes.draft_vocab}", over(many, level), read, copies)
        del many
        best = torch.rand(batch, sizes.topk**2, device=sizes.device)
        yield small_kernel(f"select_beam {sizes.topk}, batch {batch}", partial(select_beam, best, sizes.topk))
        tokens = torch.randint(0, sizes.draft_vocab, (rows,), dtype=torch.int32, device=sizes.device)
        features = sizes.random(rows, sizes.hidden)
        yield small_kernel(
            f"head_input, {rows} rows", partial(head_input, tokens, embedding, features, None, *norms, EPS)
        )
        yield small_kernel(
            f"feature_input, {rows} rows", partial(feature_input, features, None, norms[1], EPS)
        )
        yield _logits(sizes, rows, options.small)
        scored = sizes.topk + (sizes.steps - 1) * sizes.topk**2
        nodes = torch.full((batch,), sizes.nodes, dtype=torch.int32, device=sizes.device)
        build = partial(tree_build, *trees(sizes, batch, scored), nodes, sizes.nodes)
        yield small_kernel(f"tree_build {scored} → {sizes.nodes}, batch {batch}", build)
        inputs = chain_inputs(sizes, batch)
        verify = partial(verify_tree, inputs.tokens, inputs.parents, inputs.num_nodes, inputs.chosen)
        yield small_kernel(f"verify_tree {sizes.nodes} nodes, batch {batch}", verify)
        accept = partial(
            synthetic_acceptance, inputs.tokens, inputs.parents, inputs.depths, inputs.num_nodes,
            inputs.ancestors, inputs.chosen, inputs.positions, inputs.seeds, inputs.thresholds, sizes.vocab,
        )  # fmt: skip
        yield small_kernel(f"synthetic_acceptance {sizes.nodes} nodes, batch {batch}", accept)


def _logits(sizes: KernelSizes, rows: int, small: bool) -> KernelCase:
    """Return the case of the logits of one level of an EAGLE-3 draft, with the fused last norm."""
    out, width = sizes.matrices()["draft lm_head"]
    nbytes = out * width * sizes.dtype.itemsize
    many = [sizes.random(out, width) * width**-0.5 for _ in range(copies_for(nbytes, small))]
    x = sizes.random(rows, width)
    stream = add_sums(x, x, sizes.random(width), EPS)
    work = Work(nbytes + rows * (out + width) * sizes.dtype.itemsize, 2.0 * rows * out * width)
    return KernelCase(
        f"project_normed draft lm_head {out}×{width}, {rows} rows",
        over(many, partial(project_normed, stream)),
        work,
        len(many),
    )


def _expand(scores: torch.Tensor, topk: int, logits: torch.Tensor) -> object:
    return topk_expand(logits, scores, topk)


def _level(beam: Beam | None, topk: int, candidates: Candidates, words: int, logits: torch.Tensor) -> object:
    return expand_level(logits, beam, 1, topk, candidates, words=words, last=False)


def round_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield a round's kernels that are not part of a draft or target pass, for an in-process draft."""
    device, columns = sizes.device, sizes.steps + 1
    pages = -(-(sizes.context + sizes.nodes + columns + sizes.steps * sizes.topk) // sizes.page_size) + 1
    for batch in sizes.batches:
        case = f"batch {batch}"
        live, root = (
            torch.ones(batch, dtype=torch.int32, device=device),
            torch.zeros(batch, columns, dtype=torch.int32, device=device),
        )
        lens = torch.full((batch,), sizes.context, dtype=torch.int32, device=device)
        table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        tree = chain_inputs(sizes, batch)
        packed = torch.zeros(batch, 2 + 2 * columns, dtype=torch.int32, device=device)
        ring = torch.zeros((PLACES, *packed.shape), dtype=torch.int32, pin_memory=device.type == "cuda")
        yield small_kernel(
            f"post_round, {case}",
            partial(post_round, packed, ring, torch.zeros(1, dtype=torch.int32, device=device)),
        )
        shape = {
            "rows": columns,
            "depth": sizes.steps,
            "topk": sizes.topk,
            "page_size": sizes.page_size,
            "lead": 0,
        }
        plan = partial(round_plan, lens, live, root, tree.num_nodes, table, **shape)
        yield small_kernel(f"round_plan {sizes.steps}/{sizes.topk}, {case}", plan)


def trade_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the kernels that exchange a round's data between processes, or between the target's ranks."""
    device, columns, nodes = sizes.device, sizes.steps + 1, sizes.nodes
    number, expected = (torch.full((1,), ROUND_NUMBER, dtype=torch.int32, device=device) for _ in range(2))
    for batch in sizes.batches:
        case = f"batch {batch}"
        tree, counts = chain_inputs(sizes, batch), torch.ones(batch, dtype=torch.int32, device=device)
        fresh = torch.zeros(batch, columns, dtype=torch.int32, device=device)
        check = partial(
            tree_check,
            number,
            expected,
            tree.num_nodes,
            tree.tokens,
            tree.parents,
            fresh,
            counts,
            vocab_size=sizes.vocab,
            depth=nodes,
        )
        yield small_kernel(f"tree_check {nodes} nodes, {case}", check)
        yield small_kernel(f"admit_counts, {case}", partial(admit_counts, number, expected, counts))
        trees_of = (tree.num_nodes, tree.tokens, tree.parents)
        yield small_kernel(
            f"pack_trees {nodes} nodes, {case}",
            partial(pack_trees, *trees_of, *(torch.empty_like(one) for one in trees_of)),
        )
        nbytes = batch * columns * sizes.hidden * sizes.dtype.itemsize
        blob, slot, word = (
            torch.zeros(size, dtype=torch.uint8, device=device) for size in (nbytes, nbytes, 16)
        )
        yield small_kernel(
            f"post_blob of {nbytes} bytes", partial(post_blob, blob, slot.data_ptr(), ROUND_NUMBER)
        )
        yield small_kernel(
            f"fetch_blob of {nbytes} bytes",
            partial(fetch_blob, slot.data_ptr(), blob, word.data_ptr(), ROUND_NUMBER),
        )
    boxes = [torch.empty(box_shape(2), dtype=torch.int64, device=device) for _ in range(2)]
    sender, receiver = (Mail.of(rank, boxes, PATIENCE) for rank in range(2))
    words, came = (
        torch.arange(nodes, dtype=torch.int32, device=device),
        torch.empty(1, nodes, dtype=torch.int32, device=device),
    )

    def pass_words() -> None:
        send_words(words, sender, range(1, 2), missing=-1)
        receive_words(came, receiver, range(1), missing=-1)

    yield small_kernel(f"send_words and receive_words, {nodes} words", pass_words)
