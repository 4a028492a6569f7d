"""HuggingFace Trainer: writes its checkpoints in the background, and publishes each as a whole.

    from fastpersist.integrations.huggingface import attach

    attach(trainer)

This is all that a program needs. `FastPersistCallback` serves programs that cannot reach the Trainer object;
`last_checkpoint` finds the newest whole checkpoint.
"""

from .attachment import Attachment, FastPersistCallback, attach, last_checkpoint

__all__ = ["Attachment", "FastPersistCallback", "attach", "last_checkpoint"]
