"""The gateway's client of the target: the session that is kept open, and the stream of one sequence on it."""
