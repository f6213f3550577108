"""The draft service: follows the target's sequences and proposes token trees. Nothing here decides what is emitted."""
