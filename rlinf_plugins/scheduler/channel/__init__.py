"""The elastic-pipeline data channel."""
