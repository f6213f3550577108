"""Finds or downloads the folder of a model that the user names as on a hub (`ORG/NAME`)."""
