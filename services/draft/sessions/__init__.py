"""The draft's copies of the target's sequences (sessions): commits, resync after gaps, eviction, expiry."""
