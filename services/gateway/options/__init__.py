"""The table of all options that clients can set. The fields of REST and gRPC are written from this table."""
