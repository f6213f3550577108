"""API keys: which keys exist, what each key may do, how much each key may use, and which routes are admin."""
