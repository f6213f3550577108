"""The gateway's client of the target: the persistent session, and the stream of each sequence on it."""
