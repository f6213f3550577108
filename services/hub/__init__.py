"""Finds the folders of models: named folders, models of a hub (downloaded if needed), the embedded pair."""
