"""Parsers and the ways to damage what they read."""
