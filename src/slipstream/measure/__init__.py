"""Models with random weights, timed on the device at hand: one rank of a full-size model, and tiles for its kernels."""
