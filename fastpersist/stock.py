"""torch's own save and load, as they were when this package was imported.

`fastpersist.install` puts ours in their place; what we leave to torch goes to these, never to ourselves.
"""

from __future__ import annotations

import torch

__all__ = ["stock_load", "stock_save"]

stock_save = torch.save
stock_load = torch.load
