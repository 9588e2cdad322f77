"""`python -m slipstream` is the `slipstream` command."""

from slipstream.cli.main import main

main()
