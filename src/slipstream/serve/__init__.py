"""An OpenAI-compatible server that shows its speculation."""
