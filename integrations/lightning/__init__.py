"""Lightning: checkpoints that are written while training goes on, by the Trainer and by Fabric.

    io = FastPersistCheckpointIO()
    trainer = Trainer(plugins=[io], callbacks=[FastPersistCallback(), ModelCheckpoint(...)])

The plugin saves and loads, the callback says when the optimizer is about to step. Every checkpoint is the ordinary
.ckpt of Lightning. When `fit()` returns, or raises, all of them are durable. Between a save and that, a name that was
accepted counts as taken, loading it through the Trainer waits for it, and what ModelCheckpoint removes or links to is
removed or linked once the new file is durable. Code of yours that opens a file in the middle of `fit()` calls
`io.wait()` before. Fabric's FSDP and ModelParallel take no plugin: `fastpersist.integrations.lightning_fabric`.

Written for `lightning`. Where the program has imported `pytorch_lightning` alone, or that alone is installed, the
classes here derive from its classes. Both accept them.
"""

from .plugin import FastPersistCallback, FastPersistCheckpointIO, last_checkpoint

__all__ = ["FastPersistCallback", "FastPersistCheckpointIO", "last_checkpoint"]
