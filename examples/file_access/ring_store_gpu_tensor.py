"""Store a GPU tensor with `fp.TensorFile`: one locked buffer is written while the next part is copied to the other.

`file.write(tensor)` stores it too; it needs host memory of the tensor's size, and writes when all of that is copied.

python examples/file_access/ring_store_gpu_tensor.py [--file PATH] [--size-mb N] [--loop N] [--validate]
"""

from __future__ import annotations

import torch
from command_line import store_command

import fastpersist as fp

PART_BYTES = 32 << 20

with store_command(__doc__) as command:
    tensor = torch.empty(command.size_bytes, dtype=torch.uint8, device=command.gpu())
    buffers = [command.locked_tensor(PART_BYTES) for _ in range(2)]  # after CUDA has begun: it knows them then
    for path in command.stores(tensor):
        with fp.TensorFile(path, "w") as file:
            file.allocate(tensor.nbytes)  # once, instead of bit by bit
            writes: list[fp.PendingIO] = []
            for i, part in enumerate(tensor.split(PART_BYTES)):
                if i >= 2:
                    writes[i - 2].wait()  # then its buffer is free
                buffer = buffers[i % 2][: part.nbytes]
                buffer.copy_(part)  # returns when it is copied
                writes.append(file.write_async(buffer, i * PART_BYTES))
            file.sync()  # waits for all of them; bytes and name
