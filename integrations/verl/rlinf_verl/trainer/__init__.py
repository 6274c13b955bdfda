"""The trainer mode m2flow."""
