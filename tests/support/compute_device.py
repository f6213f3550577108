"""Where tests compute: on a CPU, or where the environment variable `OUTRIDER_TEST_DEVICE` says (`cuda`; `make test-gpu` sets it).

The laws are the same on both. On a GPU they run in fp32 on the compiled kernels, and those about rounds that stay on the device run
twice: eagerly, and recorded into CUDA graphs.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"
GRAPHS = [False, True] if ON_GPU else [False]
"""Whether rounds are recorded: a parameter of tests."""

# What torch does unless told otherwise, stated: fp32 products are fp32.
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
