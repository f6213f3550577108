"""Training code of the demo's models: corpus, tokenizer, target, EAGLE-3 head, and their evaluation.

The code needs only torch, transformers, tokenizers, safetensors and, for progress bars, rich. Anyone can
therefore repeat the training.
Run the modules ``target``, ``eagle3`` and ``evaluate`` in this order, for example with ``python -m
outrider.train.target``.
"""
