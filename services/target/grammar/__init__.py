"""Grammars of outputs: compiles them in a process of its own, and finds the allowed tokens of every tree node."""
