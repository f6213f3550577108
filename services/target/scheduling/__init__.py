"""Which sequences run, and which of them hold KV pages."""
