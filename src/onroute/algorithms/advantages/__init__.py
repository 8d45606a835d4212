"""How rewards become advantages, one file each."""
