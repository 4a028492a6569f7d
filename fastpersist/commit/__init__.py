"""Names on disk: temporary, durable, visible; of files and of directories. Locks, removal, the listing of steps."""
