"""Statistics of federations and of runs: plain values that reports draw and tests read."""
