"""The `slipstream` command: each verb is imported only when chosen."""
