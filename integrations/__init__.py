"""Glue to the frameworks, one module or package for each, importable as `fastpersist.integrations`.

What is here uses public names of fastpersist only (but `torch_dcp`, which re-exports fastpersist.dcp), and imports its
framework inside itself, so importing one integration never needs another's framework.
"""
