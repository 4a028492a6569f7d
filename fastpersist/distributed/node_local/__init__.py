"""Steps on disks that not all ranks share: which ranks share what, and the exchange of bytes between them."""
