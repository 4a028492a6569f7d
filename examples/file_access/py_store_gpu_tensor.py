"""Store a GPU tensor with plain Python: copy it to pinned host memory of the same size, then write that.

python examples/file_access/py_store_gpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

import os

import torch
from command_line import store_command

with store_command(__doc__) as command:
    tensor = torch.empty(command.size_bytes, dtype=torch.uint8, device=command.gpu())
    host = torch.empty(tensor.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
    for path in command.stores(tensor):
        host.copy_(tensor)
        with open(path, "wb") as file:
            file.write(host.numpy())
            file.flush()
            os.fsync(file.fileno())  # the bytes
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(directory)  # the name
        os.close(directory)
