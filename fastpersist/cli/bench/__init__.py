"""`fastpersist bench`: how fast this disk, fio, torch and we are, in turn."""
