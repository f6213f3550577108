"""Receives messages from targets and turns them into commands for the draft engine."""
