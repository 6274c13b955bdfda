"""Conformance suites that third parties subclass."""
