"""The sequences that a draft follows: a state machine without any model."""
