"""Store a CPU tensor with `fp.TensorFile`: direct I/O, with many requests in flight, and durable after `sync`.

python examples/file_access/ring_store_cpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

from command_line import store_command

import fastpersist as fp

with store_command(__doc__) as command:
    tensor = command.locked_tensor(command.size_bytes)  # fp.locked_tensor; others will do, but are copied
    for path in command.stores(tensor):
        with fp.TensorFile(path, "w") as file:
            file.write(tensor)
            file.sync()  # bytes and name
