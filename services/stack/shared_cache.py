"""Chooses one KV cache size for a target and a draft that `outrider up` starts as two processes on one GPU.

If each process chose the size from the free memory, the sizes would depend on which process starts first.
Both processes therefore get the same size. This is the size that a target would choose if its draft ran in
the target's process.
"""

from __future__ import annotations

from outrider.services.stack.options import StackOptions
from outrider.services.stack.placement import nvidia_smi_memory
from outrider.shared.spec.algorithm import Algorithm

CONTEXTS_BYTES = 2 * (600 << 20)
"""GPU memory of two processes' CUDA contexts. `mem_get_info` of a running process counts contexts as used."""
DRAFT_WORK_BYTES = 512 << 20
"""GPU memory that the draft process needs in addition to its weights and its KV cache, in bytes.

The draft process uses this memory for CUDA graphs, workspaces of matrix products, and copies that it makes
while it tunes tile sizes.
"""


def shared_kv_tokens(options: StackOptions) -> int | None:
    """Return the size of the target's KV cache and of the draft's KV cache, in tokens.

    Args:
        options: Options of a stack whose draft has its own process.

    Returns:
        The size. None if the options already set it, if the two processes do not share a GPU, or if the
        estimate shows too little memory.

    Raises:
        CheckpointError: A model folder cannot be read.
        ConfigurationError: A setting is invalid.
    """
    apart = options.algorithm is Algorithm.NGRAM or (options.tp or 1) > 1
    if options.kv_tokens is not None or apart or not options.speculates or options.device == "cpu":
        return None
    device = _numbered(options.device)
    if options.draft_device != "auto" and _numbered(options.draft_device) != device:
        return None  # each process has a GPU for itself
    memory = nvidia_smi_memory(int(device.partition(":")[2]))
    if memory is None:
        return None
    # Imported here because the modules below import torch, which a stack on a CPU does not need.
    import torch

    if options.device == "auto" and torch.version.cuda is None:
        return None  # torch was built without CUDA, so the services do not use the GPU

    from outrider.services.doctor.memory import estimate_memory
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
        **options.target_settings,
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
        estimate_memory(
            pair, settings, (free - CONTEXTS_BYTES - DRAFT_WORK_BYTES - borrowed, total)
        ).kv_tokens
        or None
    )


def _numbered(device: str) -> str:
    """Return a device with its number: ``cuda:0`` for ``auto`` and ``cuda``."""
    return "cuda:0" if device in ("auto", "cuda") else device
