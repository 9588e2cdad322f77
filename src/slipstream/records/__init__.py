"""What was measured: record files that carry their own provenance, and the arithmetic that compares them."""
