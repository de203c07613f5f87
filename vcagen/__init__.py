"""Class-conditional image generation with DiT and SiT transformers, where the attention is a config value."""

__version__ = "0.1.0"
