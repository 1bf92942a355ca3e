"""Many models trained at once: steppers, layers, optimizers, devices."""
