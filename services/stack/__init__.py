"""`outrider up`: which processes to start, with which flags, and their supervision."""
