"""Import name for users of Fabric's FSDP and ModelParallel; the code is `lightning.fabric`."""

from .lightning.fabric import attach

__all__ = ["attach"]
