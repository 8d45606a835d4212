"""Rollout routing replay: find the routers, record them, replay them, and prove that it happened."""
