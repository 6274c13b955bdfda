"""Profiles, cost, planner and simulator: pure, runs without Ray, torch or a trainer."""
