"""Reinforcement-learning post-training for mixture-of-experts models."""
