"""DeepNVMe's names over `fastpersist.TensorFile`: programs that move tensors with it run with one import changed.

    from fastpersist.integrations.deepnvme import AsyncIOBuilder  # was: from deepspeed.ops.op_builder import ...

    handle = AsyncIOBuilder().load().aio_handle(block_size=1 << 20, queue_depth=128)
    handle.async_pwrite(tensor, "weights.bin")
    handle.wait()

Arguments and results are DeepNVMe's. The differences are on purpose: what fails raises an error of fastpersist, and
nothing is printed; any contiguous tensor of any size is taken; nothing has to be freed by hand. As there, what was
written is not yet durable (`os.fsync`), and a file that is longer than what is written to it keeps its end.

For new programs `TensorFile` is the better interface: it says which operation failed.
"""

from .handles import AsyncIOBuilder, GDSBuilder, aio_handle, gds_handle

__all__ = ["AsyncIOBuilder", "GDSBuilder", "aio_handle", "gds_handle"]
