"""Tensor parallelism: one decoder spread over several processes, of which rank 0 decides and the others mirror its forward passes."""
