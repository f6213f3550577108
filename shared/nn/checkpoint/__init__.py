"""Checkpoint files: tensors read, checked and moved to the device."""
