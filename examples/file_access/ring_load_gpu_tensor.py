"""Load a GPU tensor with `fp.TensorFile`: the disk fills one locked buffer while the other is copied to the GPU.

`file.read(tensor)` loads it too; it needs host memory of the tensor's size, and copies when all of that is read.

python examples/file_access/ring_load_gpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

import torch
from command_line import load_command

import fastpersist as fp

PART_BYTES = 32 << 20

with load_command(__doc__) as command:
    tensor = torch.empty(command.size_bytes, dtype=torch.uint8, device=command.gpu())
    buffers = [command.locked_tensor(PART_BYTES) for _ in range(2)]  # after CUDA has begun: it knows them then
    for path in command.loads(tensor):
        with fp.TensorFile(path) as file:
            parts = tensor.split(PART_BYTES)
            reads = [file.read_async(buffers[0][: parts[0].nbytes], 0)]
            for i in range(len(parts)):
                reads[i].wait()
                if i + 1 < len(parts):  # the next one goes to the other buffer, which has been copied
                    reads.append(file.read_async(buffers[(i + 1) % 2][: parts[i + 1].nbytes], (i + 1) * PART_BYTES))
                parts[i].copy_(buffers[i % 2][: parts[i].nbytes])  # returns when it is copied
