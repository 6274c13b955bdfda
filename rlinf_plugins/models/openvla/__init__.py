"""OpenVLA and OpenVLA-OFT on current transformers and timm."""
