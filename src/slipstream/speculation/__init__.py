"""Speculation: draft trees, drafters, the one rule along every path, acceptance and its statistics."""
