"""Rollout engines: what samples, and takes new weights."""
