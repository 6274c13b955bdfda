"""What every part may import; imports no sibling."""
