"""The embedded default model: `config.json` of the preset `tiny`, reading and writing bytes.

It has no weights of its own yet: they are drawn as it loads, and what it says is noise.
"""
