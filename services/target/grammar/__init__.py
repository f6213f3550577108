"""Constrained outputs: compiles grammars in a separate process, and finds the tokens that they allow."""
