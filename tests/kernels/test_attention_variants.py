"""The variants that are compiled ahead are all that `choose_blocks` can choose, for heads of any kind."""

from __future__ import annotations

import random

import pytest

from outrider.kernels.tree_attention.plan import Blocks, choose_blocks
from outrider.kernels.tree_attention.variants import MOST_ROWS, all_blocks
from outrider.kernels.tree_attention.work.types import choose_work

HEADS = [(4, 8), (8, 8), (4, 2), (1, 32), (7, 4), (5, 8), (16, 1)]
"""Query heads per K/V head, and K/V heads."""
DRAWN = 2000


@pytest.mark.parametrize("processors", [132, 114, 78])
@pytest.mark.parametrize(("block_d", "itemsize", "roomy"), [(128, 2, True), (128, 2, False), (256, 4, True)])
@pytest.mark.parametrize(("group", "kv_heads"), HEADS)
def test_every_choice_is_among_the_variants(
    group: int, kv_heads: int, block_d: int, itemsize: int, roomy: bool, processors: int
) -> None:
    rng, sizes = random.Random(group * kv_heads), (kv_heads, block_d, itemsize)
    uniform, ragged = (
        set(all_blocks(group, *sizes, processors, roomy, ragged=ragged)) for ragged in (False, True)
    )
    for _ in range(DRAWN):
        bs, tokens = rng.choice([rng.randint(1, 64), rng.randint(1, 300)]), rng.choice([0, 5, 200, 10**5])
        longest = min(rng.choice([rng.randint(1, most) for most in (8, 64, 300, 8192)]), MOST_ROWS // bs)
        rows = rng.randint(longest + bs - 1, longest * bs)
        pairs = longest * group
        chosen = choose_blocks(bs, rows, pairs, *sizes, longest + tokens, processors, roomy)
        assert chosen in uniform, (bs, rows, longest, tokens)
        rows = rng.choice([rng.randint(1, 300), rng.randint(1, 8192)])
        longest = rng.choice([1, 8, 64, 128, rows])
        work = choose_work(bs, rows, longest, group, *sizes, processors, roomy)
        assert work.blocks in ragged, (bs, rows, longest)


def test_an_8b_model_has_few_variants() -> None:
    blocks = all_blocks(4, 8, 128, 2, 132, True, ragged=False)
    assert len({compiled(one) for one in blocks}) == 19
    assert len(blocks) < 30


def compiled(blocks: Blocks) -> tuple[object, ...]:
    """Return the sizes that are constants of the compiled kernel."""
    gathered = blocks.splits if blocks.gathers and blocks.splits > 1 else 0
    return (
        *(blocks.pairs, blocks.tokens, blocks.splits > 1, gathered, blocks.warps, blocks.stages),
        *(blocks.release, blocks.transposed),
    )
