"""From prompts to microbatches: stream, checks, plan, layout, recorded rollouts."""
