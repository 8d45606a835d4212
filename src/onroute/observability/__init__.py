"""What a run tells about itself: metrics, trackers, timers, progress and plots."""
