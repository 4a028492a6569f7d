"""Object to file: the skeleton, containers, ownership, capture, and the background queue."""
