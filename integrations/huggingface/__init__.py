"""HuggingFace's Trainer: its checkpoints written while it trains on, and whole or not there.

    from fastpersist.integrations.huggingface import attach

    attach(trainer)

That is all that one writes. `FastPersistCallback` is for those who cannot reach the Trainer, `last_checkpoint` finds
the newest checkpoint that is whole. What is put on a Trainer: `attachment`.
"""

from .attachment import Attachment, FastPersistCallback, attach, last_checkpoint

__all__ = ["Attachment", "FastPersistCallback", "attach", "last_checkpoint"]
