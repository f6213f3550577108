"""A target engine, or a part of it, that a test steps, and fakes of the engine's neighbours."""
