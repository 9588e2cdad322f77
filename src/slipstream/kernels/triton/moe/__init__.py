"""Mixtures of experts: the router and the experts' products."""
