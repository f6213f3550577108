"""`outrider bench mixed`: how much of a server's speed is left when its requests differ."""
