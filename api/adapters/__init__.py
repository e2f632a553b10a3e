"""Adapters, their versions, aliases and downloads."""
