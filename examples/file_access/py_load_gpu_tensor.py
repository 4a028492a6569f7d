"""Load a GPU tensor with plain Python: `readinto` pinned host memory of the same size, then copy that to the GPU.

python examples/file_access/py_load_gpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

import torch
from command_line import load_command

with load_command(__doc__) as command:
    tensor = torch.empty(command.size_bytes, dtype=torch.uint8, device=command.gpu())
    host = torch.empty(tensor.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
    for path in command.loads(tensor):
        with open(path, "rb") as file:
            if file.readinto(host.numpy()) != host.nbytes:
                raise EOFError(path)
        tensor.copy_(host)
