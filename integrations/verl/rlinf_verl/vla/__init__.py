"""OpenVLA in veRL: engine, policy server, embodied agent loop, recipes."""
