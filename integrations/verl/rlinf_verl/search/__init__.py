"""Search-R1 in veRL: agent loop, native tool, data and reward."""
