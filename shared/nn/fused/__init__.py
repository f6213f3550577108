"""Runs decoder layers on a GPU with fused kernels instead of the layers' torch operations."""

from outrider.shared.nn.fused.blocks import attention_block, mlp_block
from outrider.shared.nn.fused.forward import FusedForward, can_fuse

__all__ = ["FusedForward", "attention_block", "can_fuse", "mlp_block"]
