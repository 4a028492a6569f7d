"""Load a CPU tensor with plain Python: `readinto` its memory.

python examples/file_access/py_load_cpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

import torch
from command_line import load_command

with load_command(__doc__) as command:
    tensor = torch.empty(command.size_bytes, dtype=torch.uint8)
    for path in command.loads(tensor):
        with open(path, "rb") as file:
            if file.readinto(tensor.numpy()) != tensor.nbytes:  # numpy shares the tensor's memory
                raise EOFError(path)
