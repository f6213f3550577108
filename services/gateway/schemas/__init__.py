"""The JSON that clients send, as pydantic models: types and field names only. Ranges are checked by `parameters`."""
