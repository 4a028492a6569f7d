"""`python -m fastpersist`: runs the command `fastpersist`, for environments without its script on the PATH."""

from __future__ import annotations

import sys

from fastpersist.cli import main

if __name__ == "__main__":
    sys.exit(main())
