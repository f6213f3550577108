"""Selects the device of the tests: the CPU, or the value of `OUTRIDER_TEST_DEVICE`.

`make test-gpu` sets it to `cuda`.

The tests are the same on both. On a GPU they run compiled kernels in fp32, and tests of rounds that stay on
the device run twice: eagerly and as recorded CUDA graphs.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"
GRAPHS = [False, True] if ON_GPU else [False]
"""Values of the test parameter that turns CUDA graphs on."""

# Torch's defaults, set explicitly: fp32 products are computed in fp32, not in TF32.
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
