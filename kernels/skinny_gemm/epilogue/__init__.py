"""Epilogues: operations that follow a product, computed in the product's kernel."""
