"""How many tokens target and draft both hold that `outrider up` starts as two processes on one GPU.

Each alone would size its cache by what it finds free, which depends on who comes first; so both are told one number, of the plan that a
target with the draft in its process makes.
"""

from __future__ import annotations

import os
import subprocess

from outrider.services.stack.options import StackOptions
from outrider.shared.spec.algorithm import Algorithm

CONTEXTS_BYTES = 2 * (600 << 20)
"""What CUDA takes of a GPU for two processes, which a process's own `mem_get_info` counts as used."""
DRAFT_WORK_BYTES = 512 << 20
"""What the draft's process needs beside weights and cache: graphs, the workspaces of its products, copies while it tries tiles. The plan
counts that of the target alone, since a draft in its process shares it."""
QUERY_TIMEOUT_S = 20.0


def shared_kv_tokens(options: StackOptions) -> int | None:
    """Return the size of both caches; None where it was given, where there is no GPU to share, or where the plan says that nothing fits.

    Args:
        options: Of a stack whose draft has a process of its own.

    Raises:
        CheckpointError: A folder cannot be read.
        ConfigurationError: A setting is wrong.
    """
    apart = options.algorithm is Algorithm.NGRAM or (options.tp or 1) > 1
    if options.kv_tokens is not None or apart or not options.speculates or options.device == "cpu":
        return None
    device = options.device if options.device and options.device.startswith("cuda:") else "cuda:0"
    memory = gpu_memory(int(device.partition(":")[2]))
    if memory is None:
        return None
    # Only here: they import torch, which a stack on a CPU starts without.
    import torch

    if options.device == "auto" and torch.version.cuda is None:
        return None  # there is a GPU, and these services compute without it

    from outrider.services.doctor.memory import plan_memory
    from outrider.services.doctor.pair import Pair
    from outrider.services.target.settings import TargetSettings

    sizes = {
        "max_running_requests": options.max_running_requests,
        "mem_fraction_static": options.mem_fraction_static,
    }
    caps = {"max_steps": options.max_steps, "max_topk": options.max_topk, "max_nodes": options.max_nodes}
    given = {
        "model": options.target,
        "device": device,
        "dtype": options.dtype,
        **sizes,
        **caps,
        **options.target_flags,
    }
    settings = TargetSettings.load({name: value for name, value in given.items() if value is not None})
    dtype = settings.torch_dtype() or torch.bfloat16
    pair = Pair(
        options.target, options.draft, options.algorithm, torch.device(device), dtype, options.token_map
    )
    config, (free, total) = pair.target_config, memory
    borrowed = (
        0
        if pair.choice.algorithm is Algorithm.STANDALONE
        else 2 * config.vocab_size * config.hidden_size * dtype.itemsize
    )
    return (
        plan_memory(pair, settings, (free - CONTEXTS_BYTES - DRAFT_WORK_BYTES - borrowed, total)).kv_tokens
        or None
    )


def gpu_memory(index: int) -> tuple[int, int] | None:
    """Return (free, total) bytes of a GPU that this process sees as number `index`, by its driver's tool; None if there is none.

    Asking CUDA would take memory of it for as long as this process lives.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [name.strip() for name in (named or "").split(",") if name.strip()]
    if named is not None and index >= len(visible):
        return None  # an empty list hides all
    command = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            [*command, f"--id={visible[index] if visible else index}"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
        free, total = (int(part) << 20 for part in asked.stdout.strip().split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return free, total
