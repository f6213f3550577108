"""Runs the Triton kernels under the interpreter. The variable must be set before triton is imported, so this folder has its own process."""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "triton was imported without TRITON_INTERPRET=1: run tests/kernels in a pytest process of its own"
    )
os.environ["TRITON_INTERPRET"] = "1"
