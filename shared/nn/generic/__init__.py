"""Causal language models that run through `transformers`' modules, with this project's attention.

`choose` selects these models: `transformers` implements them, and no file in `families` reads them.
`probe` runs the model once on the meta device to find out how it attends, and rejects models that cannot be
served. `model` is the `Decoder` that runs it. `transformers` is imported only for such models.
"""
