"""Tiles chosen by measurement: the cache the runtime reads, and the tools that fill it."""
