"""Where metrics go, one file each."""
