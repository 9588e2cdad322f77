"""Adapting a draft to what a server answers."""
