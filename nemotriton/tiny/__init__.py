"""The embedded default model: `config.json` of the preset `tiny`, reading and writing bytes.

It has no weights of its own yet: they are drawn at load from `SEED`, and what it says is noise.
"""

from pathlib import Path

DIRECTORY = Path(__file__).parent
SEED = 0
