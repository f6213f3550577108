"""`outrider bench serve`: a load on a running server, over REST or gRPC."""
