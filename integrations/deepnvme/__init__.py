"""DeepNVMe's interface over `fastpersist.TensorFile`: programs that use DeepNVMe change one import.

    from fastpersist.integrations.deepnvme import AsyncIOBuilder  # was: from deepspeed.ops.op_builder import ...

    handle = AsyncIOBuilder().load().aio_handle(block_size=1 << 20, queue_depth=128)
    handle.async_pwrite(tensor, "weights.bin")
    handle.wait()

Arguments and results are DeepNVMe's. Differences: failures raise errors of fastpersist, and print nothing; contiguous
tensors of any size work; no memory has to be freed by hand. As in DeepNVMe, writes are not durable before `os.fsync`,
and writing to a longer file does not truncate it.

For new programs `TensorFile` is the better interface: it says which operation failed.
"""

from .handles import AsyncIOBuilder, GDSBuilder, aio_handle, gds_handle

__all__ = ["AsyncIOBuilder", "GDSBuilder", "aio_handle", "gds_handle"]
