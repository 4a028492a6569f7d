"""Store a CPU tensor with plain Python: write its memory, and make it durable.

python examples/file_access/py_store_cpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

import os

import torch
from command_line import store_command

with store_command(__doc__) as command:
    tensor = torch.empty(command.size_bytes, dtype=torch.uint8)
    for path in command.stores(tensor):
        with open(path, "wb") as file:
            file.write(tensor.numpy())  # shares the tensor's memory; `tofile` does the same
            file.flush()
            os.fsync(file.fileno())  # the bytes
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(directory)  # the name
        os.close(directory)
