"""Selects the device on which the tests run: the CPU, or the value of `OUTRIDER_TEST_DEVICE`.

`make test-gpu` sets the variable to `cuda`.

The same tests run on a CPU and on a GPU. On a GPU, they use compiled kernels in fp32. Tests of rounds that
stay on the device run twice there: eagerly and as recorded CUDA graphs.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"
GRAPHS = [False, True] if ON_GPU else [False]
"""Values of the test parameter that turns CUDA graphs on."""

# These are torch's defaults, set explicitly: fp32 products are computed in fp32, not in TF32.
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
