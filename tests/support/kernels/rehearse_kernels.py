"""Rehearses kernels for an absent GPU, so that they are compiled ahead of time.

`test_compile_ahead` runs this module in its own process. The module prints the outcome of each case as JSON.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from outrider.kernels import ahead
from outrider.kernels._dispatch import force_backend
from outrider.kernels.add_norm import rms_norm
from outrider.kernels.ahead import pool as compiler_pool
from outrider.kernels.ahead.pool import CompilerPool


class AbsentGpu:
    """The methods that Triton calls on a driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def rehearse(pool: CompilerPool, times: int) -> torch.Tensor:
    with ahead._rehearsal(pool):
        for _ in range(times):
            result = norm_rows()
    return result


def norm_rows() -> torch.Tensor:
    with force_backend("triton"):
        return rms_norm(torch.ones(3, 64), torch.ones(64), 1e-5)


def launches_elsewhere(pool: CompilerPool) -> bool:
    """Return True if another thread really launches its kernel during a rehearsal.

    A real launch fails here, because there is no GPU.
    """
    with ahead._rehearsal(pool), ThreadPoolExecutor(1) as thread:
        return thread.submit(norm_rows).exception() is not None


def main() -> None:
    driver.set_active(AbsentGpu())  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {}
    late, compiler_pool.MOST_PROCESSES = CompilerPool(), 0  # no process compiles the kernel in time
    rehearse(late, 1)
    late.wait(0, limit_s=0.0)
    found["forgotten"] = [late.submitted, late.state_of(norm_rows).name]
    rehearse(late, 1)
    found["asked for again"] = late.submitted
    compiler_pool.MOST_PROCESSES = 1
    compiler_pool.COMPILE_S, usual_s = 0.01, compiler_pool.COMPILE_S
    late.submit("nothing", "no job")  # starts a process for the waiting jobs
    late.wait(0)
    found["given up"] = late.state_of(norm_rows).name
    compiler_pool.COMPILE_S = usual_s
    pool = CompilerPool()
    found["output"] = rehearse(pool, 5).abs().max().item()
    found["submitted"] = pool.submitted
    told: list[tuple[int, int]] = []
    pool.wait(0, lambda done, total: told.append((done, total)))
    found["told"] = told
    found["compiled"] = pool.compiled
    found["state"] = pool.state_of(norm_rows).name
    again = CompilerPool()
    found["output_again"] = (
        rehearse(again, 2).abs().max().item()
    )  # already compiled, but not launched, because this driver cannot launch
    found["missing"] = again.submitted
    found["launched elsewhere"] = launches_elsewhere(again)
    broken = CompilerPool()
    broken.submit(
        "system", json.dumps({"module": "os", "name": "system", "target": ["cuda", 90, 32], "data": "{}"})
    )
    broken.submit("nothing", "no job")
    broken.wait(0)
    found["refused"] = [broken.submitted, broken.compiled]
    compiler_pool.COMPILE_S = 0.01
    slow = CompilerPool()
    slow.submit("slow", "{}")
    slow.wait(0)
    found["too slow"] = [slow.submitted, slow.compiled]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
