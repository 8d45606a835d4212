"""The drivers, and the handles they drive."""
