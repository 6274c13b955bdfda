"""The env-worker pool and its simulator adapters."""
