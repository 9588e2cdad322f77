"""Tool calls and reasoning: what a model writes in its family's own syntax, as events that every API answers with."""
