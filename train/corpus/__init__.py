"""The generated corpus: one module per topic, a split rule (``base``) and whole conversations (``conversations``)."""
