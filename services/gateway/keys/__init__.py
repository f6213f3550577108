"""API keys: reads the keys, limits what and how much each key may use, and lists the admin routes."""
