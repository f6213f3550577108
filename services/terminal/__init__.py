"""Programs for the terminal: `outrider chat` and `outrider top`, clients of a running gateway."""
