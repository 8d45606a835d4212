"""Every model type that routes tokens to experts, and how to build a tiny one."""
