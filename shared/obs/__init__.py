"""What a service says about itself: structured logs and Prometheus metrics. Imports no torch."""
