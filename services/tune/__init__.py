"""`outrider tune`: finds the best default tree shape for a pair, device and prompts, and writes a profile."""
