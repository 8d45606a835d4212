"""Policy losses, one file each."""
