"""The small networks around the language model: projectors, output rows and value head."""

import torch
from torch import nn


class FusedProjector(nn.Module):
    """Maps fused patch features to the language model's width: three layers, GELU (erf) between.

    Args:
        vision_dim: Width of the concatenated features (2176 in the 7B model).
        text_dim: Width of the language model (4096 in the 7B model).
    """

    def __init__(self, vision_dim: int, text_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, text_dim)
        self.fc3 = nn.Linear(text_dim, text_dim)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map ``[..., vision_dim]`` to ``[..., text_dim]``."""
        hidden = nn.functional.gelu(self.fc1(features))
        return self.fc3(nn.functional.gelu(self.fc2(hidden)))  # type: ignore[no-any-return]


class ProprioProjector(nn.Module):
    """Maps the normalised proprioceptive state to one token of the language model.

    Args:
        proprio_dim: Size of the state.
        text_dim: Width of the language model.
    """

    def __init__(self, proprio_dim: int, text_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, text_dim)
        self.fc2 = nn.Linear(text_dim, text_dim)

    def forward(self, proprio: torch.Tensor) -> torch.Tensor:
        """Map ``[B, proprio_dim]`` to ``[B, 1, text_dim]``."""
        return self.fc2(nn.functional.gelu(self.fc1(proprio))).unsqueeze(1)  # type: ignore[no-any-return]


class VocabularyHead(nn.Linear):
    """The output layer, able to compute some of its rows only.

    Action tokens are a few hundred of 32064 rows, and the rows to compute must be picked inside ``forward``: a sharded
    weight is whole only there.

    Args:
        weight: ``[vocabulary, text_dim]``, taken over as it is.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight

    def forward(self, hidden: torch.Tensor, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Map ``[..., text_dim]`` to logits of the token ids ``[first, last)``."""
        return nn.functional.linear(hidden, self.weight[first:last])


class ValueHead(nn.Module):
    """State values from the last hidden state at the end of the prompt.

    Args:
        text_dim: Width of the language model.
        outputs: Values per decision: 1, or one for each action of the chunk.
    """

    def __init__(self, text_dim: int, outputs: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(text_dim, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, outputs, bias=False)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[B, text_dim]`` to ``[B, outputs]``, in float32."""
        dtype = next(self.mlp.parameters()).dtype
        return self.mlp(hidden.to(dtype)).float()  # type: ignore[no-any-return]
