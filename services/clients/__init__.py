"""Small clients of running services: the REST API and gRPC health checks."""
