"""The generated corpus: one module per topic, the split rule (``base``) and whole ``conversations``."""
