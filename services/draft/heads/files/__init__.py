"""Head checkpoints as published: dialects of config.json, tensor names, token maps."""
