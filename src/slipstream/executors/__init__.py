"""Executors: what runs a planned step, on whatever device, behind one interface."""
