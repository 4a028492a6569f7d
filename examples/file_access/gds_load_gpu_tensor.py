"""Load a GPU tensor by GPUDirect: from the disk to the GPU, with no host memory in between.

`fp.TensorFile` does not use GPUDirect so far (`fp.save` and `fp.load` do: engine="cufile"), so this program says so in
one line and ends with exit code 77. It shows the future code.

python examples/file_access/gds_load_gpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

import torch
from command_line import load_command

import fastpersist as fp

with load_command(__doc__) as command:
    engine = command.gpudirect()
    tensor = torch.empty(command.size_bytes, dtype=torch.uint8, device=command.gpu())
    for path in command.loads(tensor):
        with fp.TensorFile(path, engine=engine) as file:
            file.read(tensor)
