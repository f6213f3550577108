"""What every service stands on: errors, settings, lifecycle. Imports no torch and no gRPC."""
