"""Experiments from TOML files: one folder a run, resumable, and comparisons of policies."""
