"""`fastpersist bench rows`: rows of a table larger than memory, gathered from disk.

- `command`: the options, the table, the JSON
- `ways`: what gathers rows: fio, fp.RowStore, mapped files, a pool of threads, a tensor in memory
"""
