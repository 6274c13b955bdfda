"""The device lock and the context switcher."""
