"""A directory of steps: save, load, retention, signals, merge."""
