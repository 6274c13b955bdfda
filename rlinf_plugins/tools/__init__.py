"""The search-tool worker pool and its retrievers."""
