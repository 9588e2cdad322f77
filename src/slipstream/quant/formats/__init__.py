"""Number formats: how a weight becomes codes and scales, and back; each module is one family."""
