"""`fastpersist bench io`: requests of one size and depth against a file."""
