"""The services as started processes, clients for them, and small servers in their place."""
