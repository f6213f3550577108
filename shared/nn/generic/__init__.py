"""Causal language models that `transformers` knows and no family file here does: its modules, our attention.

`probe` runs the model once on the meta device and learns what its attention asks for, or refuses it by name; `model` loads the weights
and is a `Decoder` to everybody else. `transformers` is imported only for such models.
"""
