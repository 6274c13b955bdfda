"""Rollout engines registered with veRL."""
