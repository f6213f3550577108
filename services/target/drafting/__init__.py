"""Requests drafts for each round and keeps the drafter's sessions in step with the engine's sequences."""
