"""An attack on a running server: everything one client could do to the others, and what must hold meanwhile."""
