"""Load on a running server over REST or gRPC, with requests that arrive at random."""
