"""Pictures of recorded results as SVG, light and dark (`outrider bench plot`)."""
