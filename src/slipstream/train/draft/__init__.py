"""The draft as training has it: rows and features, the unrolled steps, their loss, and acceptance measured."""
