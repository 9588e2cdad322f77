"""Measures any OpenAI-compatible server over HTTP, arm against arm, and keeps what it found as records."""
