"""Training: the target writes its own data, the draft learns to run ahead of it, and a walk measures how far."""
