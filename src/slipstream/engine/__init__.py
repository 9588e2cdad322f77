"""The engine: requests, pages, scheduling, batches, the step."""
