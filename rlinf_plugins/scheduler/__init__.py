"""M2Flow: flow, planner, simulator, data channel, device lock and context switcher."""
