"""Pure numerical methods behind the policies: arrays in, positions out, no client ids."""
