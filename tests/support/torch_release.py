"""Which torch this is, for what its releases do differently."""

from __future__ import annotations

import re

import torch

TORCH = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
"""Major and minor version."""
