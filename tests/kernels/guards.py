"""Guard bands: buffers of kernels lie between poisoned elements, which must be unchanged afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from outrider.kernels import _launch
from outrider.kernels._dispatch import Backend, force_backend

INTEGER_POISON = 0x7B  # as an index, far outside every buffer
FLOAT_POISON = 0xFF  # a NaN in every float type


class Guards:
    """Allocates guarded buffers and checks their bands.

    Args:
        pad: Elements before and after each buffer. An odd number also makes the buffer's address odd.
    """

    def __init__(self, pad: int = 67) -> None:
        self.pad = pad
        self._buffers: list[tuple[str, torch.Tensor, int, int]] = []

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str = "allocated inside"
    ) -> torch.Tensor:
        """Return a buffer filled with poison, so that elements a kernel does not write show up."""
        size = 1
        for extent in shape:
            size *= extent
        flat = torch.empty(size + 2 * self.pad, dtype=dtype, device=device)
        flat.view(torch.uint8).fill_(FLOAT_POISON if dtype.is_floating_point else INTEGER_POISON)
        self._buffers.append((name, flat, self.pad, self.pad + size))
        return flat[self.pad : self.pad + size].view(shape)

    def put(self, tensor: torch.Tensor, name: str = "argument") -> torch.Tensor:
        """Return a guarded copy of a tensor."""
        guarded = self.empty(tuple(tensor.shape), tensor.dtype, tensor.device, name)
        return guarded.copy_(tensor)

    def check(self) -> None:
        """Fail if any band was written."""
        assert self._buffers
        for name, flat, begin, end in self._buffers:
            poison = FLOAT_POISON if flat.dtype.is_floating_point else INTEGER_POISON
            for side, band in (("before", flat[:begin]), ("after", flat[end:])):
                assert bool((band.view(torch.uint8) == poison).all()), (
                    f"a kernel wrote {side} the buffer: {name}"
                )


@contextlib.contextmanager
def triton_version(guards: Guards) -> Iterator[None]:
    """Run the Triton versions of ops with guarded buffers of their own; check all bands afterwards."""
    with force_backend(Backend.TRITON), mock.patch.object(_launch, "empty", guards.empty):
        yield
    guards.check()


def reference_version() -> contextlib.AbstractContextManager[None]:
    """Run the torch references of ops, on any device."""
    return force_backend(Backend.REFERENCE)
