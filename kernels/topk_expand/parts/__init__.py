"""The vocabulary of a row in parts, and merging them."""
