"""`fastpersist bench`: measures fastpersist, torch and others against fio on one disk, in turn.

One harness for all commands, and for the programs in benchmarks/:

- `rows`: rows, samples, and the rounds in which rows take turns
- `places`: DIR and the files of results: early checks, scratch directories, room on the disk
- `report`: facts on the machine, tables, notes, the head of the JSON
- `fio`: the yardstick; `sandbox`: a process without io_uring
- `save_rows`, `load_rows`, `states`: the savers, loaders and states; cold and warm files
- `worker`: a process for rows whose memory is measured (`cli.child_process` starts all processes)

The commands: `command` is `bench save` and `bench load`; `io`, `overlap`, `ranks`, `stream` and `row_store` (which is
`bench rows`) are packages. In each, `command` has the options, `report` or `tables` the output, and `worker`, `work` or
`processes` the code of other processes.
"""
