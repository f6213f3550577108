"""config.json: parsed and checked, or refused with the key and the fix."""
