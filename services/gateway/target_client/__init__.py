"""The gateway's client of the targets: persistent sessions, the choice of a target, and sequence streams."""
