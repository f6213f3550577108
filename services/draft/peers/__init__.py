"""Replies to targets in other processes, and rounds that stay on the devices of both sides."""
