"""Load a CPU tensor with `fp.TensorFile`: direct I/O, with many requests in flight.

python examples/file_access/ring_load_cpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

from command_line import load_command

import fastpersist as fp

with load_command(__doc__) as command:
    tensor = command.locked_tensor(command.size_bytes)  # fp.locked_tensor; others will do, but are copied to
    for path in command.loads(tensor):
        with fp.TensorFile(path) as file:
            file.read(tensor)  # raises if the file is too short
