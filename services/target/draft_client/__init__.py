"""The target's client of a remote draft: the drafter, its connection, what it remembers of a sequence, the check of trees."""
