"""`fastpersist tune`: finds the settings that suit a disk, and keeps them in a file."""
