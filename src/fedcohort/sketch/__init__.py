"""Distribution sketches: what they are, how far apart they are, how they travel."""
