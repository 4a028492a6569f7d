"""`fastpersist bench`: how fast this disk, fio, torch and we are, in turn.

One harness for all commands, and for the programs in benchmarks/:

- `rows`: what a row and a sample are, and the rounds in which rows take turns
- `places`: DIR and the files of results: refused early, scratch directories, room on the disk
- `report`: facts on the machine, tables, notes, the head of the JSON
- `fio`, `io.gdsio`: the yardsticks; `sandbox`: a process without io_uring
- `save_rows`, `load_rows`, `states`: what is saved and loaded, by whom; cold and warm files
- `worker`: a process of its own for rows whose memory is measured (`cli.child_process` starts all processes)

The commands: `command` is `bench save` and `bench load`; `io`, `overlap` and `ranks` are packages. In each, `command`
has the options, `report` or `tables` what is said, and `worker`, `work` or `processes` what other processes do.
"""
