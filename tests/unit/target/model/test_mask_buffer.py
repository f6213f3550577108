"""Masks at a fixed address: unrestricted rows allow every token, and rows of earlier rounds do not linger."""

from __future__ import annotations

import torch

from outrider.services.target.model.mask_buffer import MaskBuffer, _merged


def test_rows_that_are_not_restricted_allow_every_token() -> None:
    buffer = MaskBuffer(6, 2, torch.device("cpu"))
    before = buffer.on_device(6)
    buffer.clear()
    buffer.rows(1, 3)[:] = 7
    buffer.upload()
    assert buffer.on_device(6).tolist() == [[-1, -1], [7, 7], [7, 7], [-1, -1], [-1, -1], [-1, -1]]
    buffer.clear()
    buffer.rows(4, 5)[:] = 3
    buffer.upload()
    assert buffer.on_device(6).tolist() == [[-1, -1]] * 4 + [[3, 3], [-1, -1]]
    assert buffer.on_device(6).data_ptr() == before.data_ptr(), "recorded graphs read these masks"


def test_the_masks_of_earlier_rows_are_copied_too() -> None:
    buffer = MaskBuffer(8, 1, torch.device("cpu"))
    buffer._device = buffer._host.clone()  # as on a GPU
    buffer.clear()
    buffer.rows(0, 2)[:] = 0
    buffer.rows(5, 6)[:] = 1
    buffer.upload()
    assert buffer.on_device(8).flatten().tolist() == [0, 0, -1, -1, -1, 1, -1, -1]
    buffer.clear()
    assert buffer.on_device(8)[0, 0] == 0, "nothing changes before the upload"
    buffer.rows(2, 4)[:] = 2
    buffer.upload()
    assert buffer.on_device(8).flatten().tolist() == [-1, -1, 2, 2, -1, -1, -1, -1]


def test_ranges_are_merged() -> None:
    assert list(_merged([])) == []
    assert list(_merged([(4, 6), (0, 2), (2, 3), (5, 7)])) == [(0, 3), (4, 7)]
    assert list(_merged([(0, 5), (1, 2), (5, 5)])) == [(0, 5)]
