"""Properties of the ops, checked against plain Python and not against another kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import candidates_of

from outrider.kernels._dispatch import Backend, force_backend, use_triton
from outrider.kernels._order import ranked_topk
from outrider.kernels.kv_store import kv_store
from outrider.kernels.philox import gumbel_noise
from outrider.kernels.topk_expand import topk_expand
from outrider.kernels.tree_attention import tree_attention
from outrider.kernels.tree_build import tree_build
from outrider.kernels.verify import SamplingTensors, choose_tokens, verify_tree
from outrider.kernels.verify.filters import filter_logits

finite = st.floats(-(2.0**100), 2.0**100, width=32)


@given(
    st.lists(
        st.one_of(finite, st.sampled_from([0.0, -0.0, 1.0, -math.inf, math.inf])), min_size=1, max_size=40
    ),
    st.data(),
)
@settings(deadline=None)
def test_order_is_value_descending_then_index_ascending(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(values)))
    best, indices = ranked_topk(torch.tensor([values]), k)
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert indices[0].tolist() == wanted
    assert best[0].tolist() == [values[i] for i in wanted]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**30))
@settings(deadline=None, max_examples=80)
def test_a_built_tree_is_a_tree_of_the_best_scores(
    depth: int, topk: int, columns: int, budget: int, seed: int
) -> None:
    scores, tokens, parents = candidates_of(1, depth, topk, torch.Generator().manual_seed(seed))
    tree = tree_build(
        scores,
        tokens,
        parents,
        torch.tensor([42], dtype=torch.int32),
        torch.tensor([budget], dtype=torch.int32),
        columns,
    )
    total = scores.shape[1]
    nodes = int(tree.num_nodes[0])
    row = scores[0].tolist()
    ranking = sorted(range(total), key=lambda c: (-row[c], c))
    assert nodes == 1 + min(total, budget - 1, columns - 1)
    kept = tree.candidates[0, 1:nodes].tolist()
    assert kept == sorted(ranking[: nodes - 1])
    assert tree.tokens[0, :nodes].tolist() == [42, *(int(tokens[0, c]) for c in kept)]
    assert (int(tree.parents[0, 0]), int(tree.depths[0, 0]), tree.ancestors[0, 0].tolist()[0]) == (-1, 0, 1)
    for node in range(1, nodes):
        parent = int(tree.parents[0, node])
        assert 0 <= parent < node
        above = int(parents[0, kept[node - 1]])
        assert above == (kept[parent - 1] if parent else -1)
        assert int(tree.depths[0, node]) == int(tree.depths[0, parent]) + 1
        masks = [
            sum((word & 0xFFFFFFFF) << 32 * w for w, word in enumerate(tree.ancestors[0, n].tolist()))
            for n in (node, parent)
        ]
        assert masks[0] == masks[1] | 1 << node
    for padded in (
        tree.tokens[0, nodes:],
        tree.depths[0, nodes:],
        tree.ancestors[0, nodes:],
        tree.parents[0, nodes:] + 1,
    ):
        assert not bool(padded.any())


def test_an_orphan_is_never_attached_to_a_stranger() -> None:
    scores = torch.tensor([[-5.0, -1.0, -0.5]])
    parents = torch.tensor([[-1, -1, 0]], dtype=torch.int32)
    count = torch.tensor([3], dtype=torch.int32)
    tree = tree_build(
        scores,
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        parents,
        torch.tensor([9], dtype=torch.int32),
        count,
        3,
    )
    assert tree.candidates[0].tolist() == [-1, 1, 2]
    assert tree.parents[0].tolist() == [-1, 0, -1]


@given(st.integers(1, 30), st.integers(0, 2**30))
@settings(deadline=None, max_examples=60)
def test_the_accepted_path_is_what_plain_decoding_would_emit(nodes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, nodes))]
    tokens = torch.randint(0, 2, (nodes,), generator=generator).tolist()
    chosen = torch.randint(0, 2, (nodes,), generator=generator).tolist()
    at, path, emitted = 0, [0], []
    while True:
        emitted.append(chosen[at])
        children = [n for n in range(nodes) if parents[n] == at and tokens[n] == chosen[at]]
        if not children:
            break
        at = children[0]
        path.append(at)
    as_row = lambda values, dtype: torch.tensor([values], dtype=dtype)  # noqa: E731
    tree = verify_tree(
        as_row(tokens, torch.int32),
        as_row(parents, torch.int32),
        torch.tensor([nodes], dtype=torch.int32),
        as_row(chosen, torch.int64),
    )
    padding = [-1] * (nodes - len(path))
    assert tree.path[0].tolist() == path + padding
    assert tree.emitted[0].tolist() == emitted + padding
    assert int(tree.num_accepted[0]) == len(path) - 1


def kept_by_filters(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Return the ids that the filters keep, computed directly from the contract."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total = sum(weights)
    above, kept = 0.0, []
    for i, weight in zip(order, weights, strict=True):
        if not kept or above < top_p:
            kept.append(i)
        above += weight / total
    return sorted(i for i in kept if i == order[0] or math.exp(logits[i] - logits[order[0]]) >= min_p)


@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=30),
    st.integers(0, 31),
    st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
    st.sampled_from([0.0, 0.011, 0.3, 1.0]),
)
@settings(deadline=None)
def test_filters_keep_what_their_contract_says(
    halves: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    logits = [half / 2 for half in halves]
    have = filter_logits(
        torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )[0]
    assert have.isfinite().nonzero().flatten().tolist() == kept_by_filters(logits, top_k, top_p, min_p)


@pytest.mark.parametrize("sharpness", [0.2, 4.0])
def test_filters_of_a_large_vocabulary_agree_with_the_whole_sort(sharpness: float) -> None:
    """The CPU version first tries the best few hundred tokens.

    The result must not depend on whether they are enough (sharp rows) or not (flat rows).
    """
    vocab = 2000
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(4)) * sharpness
    logits[:, 7::11] = logits[:, :1]  # ties
    top_k = torch.tensor([0, 0, 5, 256, 257, 1500, 0, 300], dtype=torch.int32)
    top_p = torch.tensor([0.9, 1.0, 1.0, 0.999, 1.0, 0.7, 0.0, 1.0])
    min_p = torch.tensor([0.0, 0.02, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0])
    for row in range(8):
        one = slice(row, row + 1)
        have = filter_logits(logits[one], top_k[one], top_p[one], min_p[one])[0]
        wanted = kept_by_filters(logits[row].tolist(), int(top_k[row]), float(top_p[row]), float(min_p[row]))
        assert have.isfinite().nonzero().flatten().tolist() == wanted
    together = filter_logits(logits, top_k, top_p, min_p)
    assert torch.equal(together[5], filter_logits(logits[5:6], top_k[5:6], top_p[5:6], min_p[5:6])[0])


def test_sampling_follows_the_softmax() -> None:
    """With one seed per row, the frequencies of 4 tokens are within 5 standard deviations."""
    rows, law = 20000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    ones = torch.ones(rows)
    sampling = SamplingTensors(
        ones * 0.5,
        torch.zeros(rows, dtype=torch.int32),
        ones,
        ones * 0,
        torch.arange(rows),
        torch.zeros(rows, dtype=torch.int32),
        False,
        False,
    )
    tokens = choose_tokens((law.log() * 0.5).expand(rows, 4).contiguous(), sampling, torch.full((rows,), 3))
    for token, probability in enumerate(law.tolist()):
        spread = math.sqrt(probability * (1 - probability) / rows)
        assert float((tokens == token).float().mean()) == pytest.approx(probability, abs=5 * spread)


def test_coupled_children_start_with_the_token_that_the_target_would_sample() -> None:
    """With equal logits and noise, the draft's first child is the target's choice at that position."""
    rows, vocab = 12, 200
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2
    seeds, positions, choices = (
        torch.arange(rows) * 7919,
        torch.arange(rows) + 100,
        torch.zeros(rows, dtype=torch.int32),
    )
    heat, off = torch.full((rows,), 0.8), torch.zeros(rows)
    sampling = SamplingTensors(heat, off.int(), off + 1, off, seeds, choices, False, False)
    expansion = topk_expand(
        logits, off, 3, temperature=heat, seeds=seeds, positions=positions, choices=choices
    )
    assert expansion.token_ids[:, 0].tolist() == choose_tokens(logits, sampling, positions).tolist()
    assert expansion.token_ids[:, 0].tolist() != logits.argmax(-1).tolist()
    perturbed = (logits.log_softmax(-1) / 0.8 + gumbel_noise(seeds, positions, choices, vocab)).log_softmax(
        -1
    )
    torch.testing.assert_close(expansion.scores, perturbed.topk(3).values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        expansion.logprobs, logits.log_softmax(-1).gather(1, expansion.token_ids.long())
    )


def test_a_tree_row_attends_to_its_own_path_only() -> None:
    """Each node's output equals torch's causal attention over its prefix and path as a plain sequence."""
    generator = torch.Generator().manual_seed(3)
    prefix, parents, page_size, heads, kv_heads, dim = 9, [-1, 0, 0, 1, 2, 3], 4, 4, 2, 8
    nodes = len(parents)
    q, k, v = (torch.randn(prefix + nodes, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads))
    pages = -(-(prefix + nodes) // page_size)
    table = torch.randperm(pages, generator=generator).to(torch.int32)[None]
    planes = [torch.zeros(pages, page_size, kv_heads, dim) for _ in range(2)]
    index = torch.arange(prefix + nodes)
    kv_store(k, v, planes[0], planes[1], table[0, index // page_size].long() * page_size + index % page_size)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    ancestors = torch.tensor([[sum(1 << node for node in path)] for path in paths], dtype=torch.int32)
    lens = [torch.tensor(value, dtype=torch.int32) for value in ([prefix], [prefix + nodes], [0, nodes])]
    out = tree_attention(
        q[prefix:],
        *planes,
        table,
        *lens,
        ancestors,
        scale=0.3,
        max_query_len=nodes,
        max_kv_len=prefix + nodes,
    )
    for node, path in enumerate(paths):
        seen = torch.tensor([*range(prefix), *(prefix + step for step in path)])
        keys, values = (
            part[seen].repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for part in (k, v)
        )
        query = q[prefix + node][:, None]
        plain = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.3)[:, 0]
        torch.testing.assert_close(out[node], plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("slots", "plane", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros(2, 4, 1, 8), "slots has dtype torch.int32"),
        (
            torch.zeros(4, dtype=torch.int64),
            torch.zeros(2, 4, 1, 8),
            r"slots has shape \[4\], expected \[3\]",
        ),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(2, 4, 1, 9), r"k_plane has shape \[2, 4, 1, 9\]"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(2, 4, 1, 16)[..., ::2], "k_plane must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(slots: torch.Tensor, plane: torch.Tensor, message: str) -> None:
    rows = torch.zeros(3, 1, 8)
    with pytest.raises(ValueError, match=message):
        kv_store(rows, rows, plane, plane, slots)


def test_the_choice_of_backend_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.kernels._dispatch._announced", set())
    tensor = torch.zeros(1)
    with caplog.at_level("INFO", logger="outrider.kernels"):
        assert not use_triton(tensor)
        assert not use_triton(tensor)
        with force_backend("triton"):
            assert use_triton(tensor)
        with force_backend(Backend.REFERENCE):
            assert not use_triton(tensor)
    assert caplog.messages == ["kernels on cpu run as reference", "kernels on cpu run as triton (forced)"]
