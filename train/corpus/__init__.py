"""The generated corpus: one module for each topic, the split rule (``base``), and ``conversations``."""
