"""Families of target models. Each family's file maps its config.json keys and tensor names to the decoder."""
