"""The draft's copies of the target's sequences: a state machine that resyncs on gaps and evicts idle ones."""
