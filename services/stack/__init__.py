"""Running all services together: option checks, command lines, startup and supervision for `outrider up`."""
