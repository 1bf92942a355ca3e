"""Differential privacy: noise, how much is needed, releases, budgets and planning."""
