"""The server half: settings, the round loop's entry, checkpoints, the report and the `heterofleet` command."""
