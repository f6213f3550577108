"""The `outrider bench` commands, the modules that measure, and their recorded results (results/)."""
