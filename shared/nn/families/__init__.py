"""Families of target models. Each file maps one family's config.json keys and tensor names to the decoder."""
