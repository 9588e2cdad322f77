"""Models: the forward context, layers, the Llama-class decoder, the EAGLE-3 draft, and loading with full accounting."""
