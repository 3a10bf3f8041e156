"""The typed, validated schema of everything in `configs/`."""
