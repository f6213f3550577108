"""Training code of the embedded model pair: corpus, tokenizer, target, EAGLE-3 head and their evaluation.

Needs only torch, transformers, tokenizers and safetensors, so that anybody can re-run it. Three commands:
``python -m outrider.train.target``, ``python -m outrider.train.eagle3`` and ``python -m outrider.train.evaluate``.
"""
