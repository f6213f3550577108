"""`outrider bench serve`: an open-loop load on a running server, over REST or gRPC."""
