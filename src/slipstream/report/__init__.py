"""Turns records into a page a person reads: tables, figures, and where every number came from."""
