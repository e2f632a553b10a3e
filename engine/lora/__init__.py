"""LoRA over one frozen base for many adapters at once (Hu et al. 2021, arXiv:2106.09685)."""

from engine.lora.adapter import Adapter, Factors, Gate, Named, PartLabel
from engine.lora.init import adapted_layers, new_adapter
from engine.lora.layer import LoraLinear, Router, Segment

__all__ = ["Adapter", "Factors", "Gate", "LoraLinear", "Named", "PartLabel", "Router", "Segment", "adapted_layers", "new_adapter"]
