"""Training code of the demo pair: corpus, tokenizer, target, EAGLE-3 head and their evaluation.

The code needs only torch, transformers, tokenizers and safetensors, so that anyone can rerun the training.
The main commands are ``python -m outrider.train.target``, ``python -m outrider.train.eagle3`` and
``python -m outrider.train.evaluate``.
"""
