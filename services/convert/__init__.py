"""`outrider convert`: draft heads between layouts, slow tokenizers to tokenizer.json."""
