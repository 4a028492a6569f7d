"""Fabric's FSDP and ModelParallel: the name under which users import `lightning.fabric`."""

from .lightning.fabric import attach

__all__ = ["attach"]
