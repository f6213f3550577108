"""The ways of drafting behind one interface: EAGLE heads, MTP layers, a standalone model, n-grams."""
