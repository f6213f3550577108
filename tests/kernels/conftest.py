"""Runs the Triton kernels under the interpreter.

The variable must be set before triton is imported, so this folder needs a pytest process of its own.
"""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "triton was imported without TRITON_INTERPRET=1; run tests/kernels in a separate pytest process"
    )
os.environ["TRITON_INTERPRET"] = "1"
