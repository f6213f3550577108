"""Results on disk: how they are written, found again, and turned into the tables of the docs."""
