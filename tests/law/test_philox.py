"""The noise on which target and draft must agree: published Philox vectors, and the layout in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.outputs.plain_noise import gumbel, philox
from support.suite.compute_device import DEVICE

from outrider.kernels.philox import gumbel_noise
from outrider.kernels.philox.reference import philox_words

# Random123's known-answer vectors for philox4x32-10: counter, key, output.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# (seed, position, choice, token id), the 32-bit word and the noise. Other implementations of the noise can be
# checked against these values.
PINNED = [
    ((0, 0, 0, 0), 0x6627E8D5, 0.084820),
    ((1234, 17, 0, 5), 0x7514D8CB, 0.245507),
    ((0xFFFFFFFFFFFFFFFF, 100000, 3, 4095), 0x814343C0, 0.380777),
    ((0xDEADBEEFCAFEF00D, 7, 1, 262143), 0xA4B8D43F, 0.818896),
]


def columns_of(cases: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (seed, position, choice) per row in the kernels' types; the given seeds are unsigned."""
    seeds, positions, choices = zip(*cases, strict=True)
    signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
    return (
        torch.tensor(signed).to(DEVICE),
        torch.tensor(positions).to(DEVICE),
        torch.tensor(choices, dtype=torch.int32).to(DEVICE),
    )


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert philox(counter, key) == words
    have = philox_words(
        np.array(key, dtype=np.uint32)[:, None], np.array(counter, dtype=np.uint32)[:, None, None]
    )
    assert tuple(have.flatten().tolist()) == words


words = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(words, words, words, words, words, words), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_words_equal_the_integers(cases: list[tuple[int, ...]]) -> None:
    columns = np.array(cases, dtype=np.uint32).T
    have = philox_words(columns[4:], columns[:4, :, None])
    assert have[:, :, 0].T.tolist() == [list(philox(case[:4], case[4:])) for case in cases]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 127), st.integers(1, 41))
@settings(deadline=None, max_examples=60)
def test_noise_equals_the_plain_python_one(seed: int, position: int, choice: int, vocab: int) -> None:
    have = gumbel_noise(*columns_of([(seed, position, choice)]), vocab)[0].tolist()
    assert have == pytest.approx(
        [gumbel(seed, position, choice, token) for token in range(vocab)], rel=1e-5, abs=1e-6
    )


def test_a_draft_vocabulary_gets_the_noise_of_its_target_ids() -> None:
    columns = columns_of([((1 << 64) - 5, 3, 0), (9, 3, 1), ((1 << 64) - 5, 3, 0)])
    everything = gumbel_noise(*columns, 1000)
    ids = torch.tensor([0, 999, 5, 5, 402], device=DEVICE)
    assert torch.equal(gumbel_noise(*columns, ids), everything[:, ids])
    assert torch.equal(
        everything[0], everything[2]
    )  # siblings share their noise: same seed, position and choice
    assert not torch.equal(everything[0], everything[1])


def test_rows_do_not_depend_on_their_batch() -> None:
    seeds, positions = torch.arange(8, device=DEVICE) - 4, torch.arange(8, device=DEVICE) * 7 % 3
    choices = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    together = gumbel_noise(seeds, positions, choices, 130)
    for row in range(8):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], choices[row : row + 1], 130)
        assert torch.equal(alone[0], together[row])


def test_the_noise_is_finite_at_both_ends() -> None:
    ends = torch.tensor([0, 2**32 - 1])
    uniform = ((ends >> 9).float() + 0.5) * 2.0**-23
    assert 0 < uniform[0] < uniform[1] < 1
    assert (-(-uniform.log()).log()).tolist() == pytest.approx([-2.8115, 16.6355], abs=1e-3)


def test_mean_and_variance_are_gumbels() -> None:
    noise = gumbel_noise(*columns_of([(row, row, 0) for row in range(16)]), 20000)
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize(("case", "word", "noise"), PINNED)
def test_pinned_values(case: tuple[int, int, int, int], word: int, noise: float) -> None:
    seed, position, choice, token = case
    assert philox((position, token // 4, choice, 0), (seed & 0xFFFFFFFF, seed >> 32))[token % 4] == word
    columns = columns_of([(seed, position, choice)])
    assert float(gumbel_noise(*columns, torch.tensor([token], device=DEVICE))) == pytest.approx(
        noise, abs=2e-6
    )
