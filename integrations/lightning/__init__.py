"""Lightning: the Trainer and Fabric write checkpoints in the background.

    io = FastPersistCheckpointIO()
    trainer = Trainer(plugins=[io], callbacks=[FastPersistCallback(), ModelCheckpoint(...)])

The plugin saves and loads; the callback gates the optimizer's step. Each checkpoint is Lightning's ordinary .ckpt. When
`fit()` returns or raises, all are durable. Until then ModelCheckpoint treats the name of a save under way as taken, and
the Trainer waits for it before loading it. ModelCheckpoint's removals and links run once the new file is durable. Your
code calls `io.wait()` before it opens a checkpoint during `fit()`. Fabric's FSDP and ModelParallel take no plugin: use
`fastpersist.integrations.lightning_fabric`.

The classes derive from those of `lightning`; or from those of `pytorch_lightning`, if the program has imported only
that, or only that is installed. Both packages accept them.
"""

from .plugin import FastPersistCallback, FastPersistCheckpointIO, last_checkpoint

__all__ = ["FastPersistCallback", "FastPersistCheckpointIO", "last_checkpoint"]
