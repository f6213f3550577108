"""The JSON of requests as pydantic models: field names and types. `parameters` checks the ranges."""
