"""Multi-head latent attention (MLA), absorbed: one latent per token for all heads."""
