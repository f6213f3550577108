"""Entry point of a worker process of `CompilerPool`: compiles kernels named on standard input.

The process reads one JSON object per line until standard input ends. For each object, it writes one line to
standard output as a reply. An object has these fields:

- ``module`` and ``name`` identify a kernel of this package.
- ``target`` describes the GPU: backend, architecture and warp size.
- ``data`` is Triton's own description of the argument types and constants (from `jit_cache_hook`).

The compiled kernel is stored in Triton's cache. The process does not touch a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

PACKAGE = "outrider.kernels"
NICENESS = 10
"""A worker process leaves the processors to the process that serves requests."""


def compile_kernel(job: dict[str, Any]) -> None:
    """Compile one kernel.

    Raises:
        ValueError: The kernel does not belong to this package.
    """
    import triton
    from triton import language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    module, name, data = job["module"], job["name"], json.loads(job["data"])
    if not module.startswith(PACKAGE + "."):
        raise ValueError(f"{module} is not a module of {PACKAGE}; only its kernels are compiled here")
    function = getattr(importlib.import_module(module), name)
    constants = {
        tuple(place): language.dtype(value) if language.dtype.is_dtype(value) else _constant(value)
        for place, value in zip(data["constant_keys"], data["constant_vals"], strict=True)
    }
    attributes = {
        tuple(place): value for place, value in zip(data["attrs_keys"], data["attrs_vals"], strict=True)
    }
    signature = {name: _tuples(kind) for name, kind in data["signature"].items()}
    target = GPUTarget(*job["target"])
    options = make_backend(target).parse_options(restored(data["options"]))
    triton.compile(
        ASTSource(function, signature, constants, attributes), target=target, options=options.__dict__
    )


def restored(options: dict[str, Any]) -> dict[str, Any]:
    """Return options read from JSON with lists converted back to tuples, which JSON cannot represent."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _constant(value: Any) -> Any:
    from triton import language

    return (
        language.constexpr(value["constexpr"]) if isinstance(value, dict) and "constexpr" in value else value
    )


def _tuples(kind: Any) -> Any:
    return tuple(_tuples(part) for part in kind) if isinstance(kind, list) else kind


def main() -> None:
    """Compile the kernel of each input line. Reply with "compiled", or with the compiler's error.

    After an error, the process that launches the kernel compiles it again and reports the error itself.
    """
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output that compilers print must not mix with the replies
    for line in sys.stdin:
        try:
            compile_kernel(json.loads(line))
            answers.write("compiled\n")
        except Exception as error:
            answers.write(f"{type(error).__name__}: {error}".replace("\n", " ")[:500] + "\n")


if __name__ == "__main__":
    main()
