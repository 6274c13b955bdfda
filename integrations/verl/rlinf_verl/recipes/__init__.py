"""Hydra presets, shipped as package data."""
