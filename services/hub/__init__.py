"""Finds the folder of a model that is named as on a hub: in the Hugging Face cache, or by a download."""
