"""Every command line of the published documents, taken out of them, read and started."""
