"""Runs causal language models through the modules of `transformers`, with this project's attention.

- `choose` selects the models that `transformers` implements and that no file in `families` reads.
- `probe` runs such a model once on the meta device, to find out how its layers attend. It rejects models that
  cannot be served.
- `model` contains the `Decoder` that runs the model.

`transformers` is imported only for such models.
"""
