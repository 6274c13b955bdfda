"""The veRL integration: the only code that imports verl."""
