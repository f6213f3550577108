"""Request bodies as pydantic models: field names and types. The module `parameters` checks the ranges."""
