"""Glue to the frameworks, one module for each, importable as `fastpersist.integrations`.

A module here uses public names of fastpersist only, and imports its framework inside itself, so that
importing one integration never needs another's framework.
"""
