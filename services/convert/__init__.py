"""`outrider convert`: rewrites draft heads in a standard layout and slow tokenizers as tokenizer.json."""
