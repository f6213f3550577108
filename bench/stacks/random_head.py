"""Writes a random EAGLE-3 head to a folder. The services load it like any other head."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

import torch

from outrider.bench.stacks.shapes import NamedShape
from outrider.shared.nn.dummy import SPREAD, RandomTensors
from outrider.shared.obs.progress import Progress

LAYER = "midlayer."
LOGIT_SPREAD = 6.0
"""Standard deviation of the logits. Trained heads have a similar spread, so trees grow equally deep."""


MEMORY_FOLDER = Path("/dev/shm")
MEMORY_NEEDED = 4 << 30


def memory_folder() -> Path | None:
    """Return a folder on a file system in memory (/dev/shm) with room for a draft head.

    If that file system is too small, the result is None, which selects Python's default folder for temporary
    files. In containers, the file system in memory often has only 64 MiB.
    """
    return (
        MEMORY_FOLDER
        if MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free >= MEMORY_NEEDED
        else None
    )


@torch.inference_mode()
def write_random_head(
    folder: Path, shape: NamedShape, device: torch.device | str, dtype: torch.dtype
) -> Path:
    """Write config.json and model.safetensors of a draft head with random weights.

    The head uses the target's embedding.

    Args:
        folder: An existing folder, preferably in memory (/dev/shm).
        shape: Sizes of the target and the head.
        device: Device on which the random numbers are drawn.
        dtype: Dtype of the tensors in the file.
    """
    from safetensors.torch import save_file

    config = shape.head
    hidden, draft_vocab = config["hidden_size"], config["draft_vocab_size"]
    source = RandomTensors(device, dtype)
    tensors: dict[str, torch.Tensor] = {}
    shapes = head_shapes(shape)
    with Progress("making a random head", sum(map(prod, shapes.values())), counts=False) as progress:
        for name, size in shapes.items():
            tensors[name] = source.take(name, size).cpu()
            progress.advance(prod(size))
    tensors["lm_head.weight"] *= LOGIT_SPREAD / (SPREAD * hidden**0.5)
    stride = config["vocab_size"] // draft_vocab
    tensors["d2t"] = torch.arange(draft_vocab) * (stride - 1)  # target id = stride * draft id
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1), encoding="utf-8")
    return folder


def head_shapes(shape: NamedShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each random tensor of a head, by its name in the file."""
    config = shape.head
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config["num_attention_heads"] * config["head_dim"],
        config["num_key_value_heads"] * config["head_dim"],
    )
    return {
        "fc.weight": (hidden, 3 * hidden),
        f"{LAYER}input_layernorm.weight": (hidden,),
        f"{LAYER}hidden_norm.weight": (hidden,),
        f"{LAYER}self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{LAYER}self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{LAYER}self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{LAYER}self_attn.o_proj.weight": (hidden, queries),
        f"{LAYER}post_attention_layernorm.weight": (hidden,),
        f"{LAYER}mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
