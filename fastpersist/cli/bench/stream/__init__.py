"""`fastpersist bench stream`: models whose weights stay on disk while they run, ours and others', in turn.

- `command`: the options; `report`: the table and the JSON
- `model`: the model on disk, made shard by shard; `memory_limit`: a cgroup that holds memory down
- `rows`: what is measured, and the limits; `worker`: a process for each way; `ways`: how each way builds the model
"""
