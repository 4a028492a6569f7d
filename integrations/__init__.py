"""Glue to the frameworks, one module or package for each, importable as `fastpersist.integrations`.

What is here uses public names of fastpersist only, and imports its framework inside itself, so that
importing one integration never needs another's framework.
"""
