"""Other programs' command lines: what becomes of each of their flags here, as tables, and the reader of a line."""
