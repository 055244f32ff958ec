"""Drafters: what proposes tokens to the speculative loop."""
