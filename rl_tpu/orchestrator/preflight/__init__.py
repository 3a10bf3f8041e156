"""Checks before the first run: do all programs compile, does everything fit, is the machine as the configuration says."""
