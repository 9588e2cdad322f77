"""What a draft is trained on: prompts, conversations with the target, and the corpus they make."""
