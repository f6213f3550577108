"""The target's engine loop: receives requests, schedules, prefills, runs rounds, commits and emits tokens."""
