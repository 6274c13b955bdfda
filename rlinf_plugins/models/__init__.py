"""Model families trained by the plugins."""
