"""The target's client of a draft in another process: connection, sessions, requests, checks of trees."""
