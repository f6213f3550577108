"""Targets in other processes: replies to them, and the batches whose rounds stay on the devices of both."""
