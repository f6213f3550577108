"""One step of the engine: receive, schedule, run a round, commit, emit."""
