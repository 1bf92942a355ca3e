"""Training many models at once: engines, stacked layers, devices, precision."""
