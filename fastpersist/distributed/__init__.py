"""Several ranks, one checkpoint: connections, sessions, coordinator and followers, the partition of files."""
