"""The bookkeeping of a KV cache, on the standard library alone: it runs in a browser tab."""

from kvlab.core.layers import LayerCache
from kvlab.core.spec import ModelSpec

__all__ = ["LayerCache", "ModelSpec"]
