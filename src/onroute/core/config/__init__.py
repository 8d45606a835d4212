"""The run file: sections, loading, rules, description."""
