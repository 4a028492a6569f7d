"""The containers, layout ⇄ bytes, and what a pickle holds. Pure: no I/O, no torch, hostile input expected."""
