"""`fastpersist bench ranks`: several processes that save and load one checkpoint."""
