"""Small clients of running services: the gateway's REST API and gRPC health checks."""
