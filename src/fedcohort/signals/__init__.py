"""What clients tell the server: sketches, losses, profiles, and the table that keeps them."""
