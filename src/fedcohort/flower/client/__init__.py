"""What runs at a client: it answers queries, trains, and keeps its own privacy budget."""
