"""A level of a tree in one launch, or two where the vocabulary is large."""
