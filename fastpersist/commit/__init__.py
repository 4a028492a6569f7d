"""Names on disk: temporary, durable, visible; for a file and for a directory. Locks, removal, and the listing of steps."""
