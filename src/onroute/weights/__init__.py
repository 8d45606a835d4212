"""Weights on their way from the trainer to an engine: bounded buckets, checksums, transports."""
