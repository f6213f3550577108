"""Checks of round_trade, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.round_trade import admit_counts, fetch_blob, pack_trees, post_blob


def check_admit_counts(device: str, bs: int, number: int, expected: int, guards: Guards) -> None:
    """Check that rows of this round's state do not change, and that rows of any other become idle."""
    counts = torch.arange(bs, dtype=torch.int32, device=device) % 5
    want = counts.tolist() if number == expected else [0] * bs
    header, now = (torch.tensor([value], dtype=torch.int32, device=device) for value in (number, expected))
    for version in (reference_version(), triton_version(guards)):
        with version:
            changed = guards.put(counts)
            admit_counts(guards.put(header), guards.put(now), changed)
            assert changed.tolist() == want


def check_pack_trees(device: str, bs: int, columns: int, guards: Guards) -> None:
    """Check that trees are packed completely."""
    generator = torch.Generator().manual_seed(bs * 100 + columns)
    trees = [
        torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=generator).to(device)
        for shape in ((bs,), (bs, columns), (bs, columns))
    ]
    for version in (reference_version(), triton_version(guards)):
        with version:
            packed = [guards.empty(tuple(tree.shape), torch.int32, tree.device) for tree in trees]
            pack_trees(*(guards.put(tree) for tree in trees), *packed)
            for have, want in zip(packed, trees, strict=True):
                assert torch.equal(have, want)


def check_blobs(device: str, num_bytes: int, guards: Guards) -> None:
    """Check that a blob is unchanged after posting and fetching, except for its number.

    Nothing outside of slot and blob may be written.
    """
    generator = torch.Generator().manual_seed(num_bytes)
    sent = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).to(device)
    for version in (reference_version, lambda: triton_version(guards)):
        slot, word = guards.put(sent), guards.put(torch.zeros(16, dtype=torch.uint8, device=device))
        slot.zero_()
        received = guards.put(slot)
        blob = guards.put(sent)
        if device == "cuda" and version is reference_version:
            continue  # the reference needs slots in host memory
        with version():
            post_blob(blob, slot.data_ptr(), 7)
            fetch_blob(slot.data_ptr(), received, word.data_ptr() + 4, 9)
        assert torch.equal(blob, sent)
        assert received[:4].view(torch.int32).tolist() == [7]
        assert torch.equal(received[4:], sent[4:])
        assert word.view(torch.int32).tolist() == [0, 9, 0, 0]
