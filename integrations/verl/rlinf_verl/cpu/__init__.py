"""The CPU platform with virtual devices."""
