"""Starting servers, here and on several nodes."""
