"""nemotriton: NVIDIA's Nemotron-H family with every hot path in Triton, each beside a PyTorch twin.

Importing the package is instant: torch and transformers load when a name that needs them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemotriton.engine.llm import LLM, RequestOutput
    from nemotriton.engine.sampling import SamplingParams
    from nemotriton.model.config import ModelConfig

__version__ = "0.1.0"
__all__ = ["LLM", "ModelConfig", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "nemotriton.engine.llm",
    "RequestOutput": "nemotriton.engine.llm",
    "SamplingParams": "nemotriton.engine.sampling",
    "ModelConfig": "nemotriton.model.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nemotriton' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
