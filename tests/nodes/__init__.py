"""Several machines, played by network namespaces of this one."""
