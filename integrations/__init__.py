"""Integrations with frameworks, one module or package for each, importable as `fastpersist.integrations`.

Integrations use only public names of fastpersist (except `torch_dcp`, which re-exports fastpersist.dcp). Each imports
its own framework, so importing one never needs another's framework.
"""
