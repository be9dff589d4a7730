"""Merge two checkpoints of your own network anew for every unlabelled batch.

    python examples/own_models.py

For research. Not a medical device.
"""

import torch
from torch import nn

import mergestream as ms


class YourNetwork(nn.Module):
    """Replace it with yours. The head is found by its name, or given with head="classifier"."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classifier = nn.Linear(16, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def your_checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Replace it with torch.load("lyon.pt", weights_only=True)."""
    torch.manual_seed(seed)
    return YourNetwork().state_dict()


def your_batches(count: int) -> list[torch.Tensor]:
    """Images uint8 [B,3,H,W] of any size, from your scanner or archive."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 40 + 70 * t, (8, 3, 48, 48), dtype=torch.uint8, generator=generator) for t in range(count)]


pool = ms.ExpertPool.from_state_dicts(
    {"lyon": your_checkpoint(1), "brest": your_checkpoint(2)},
    YourNetwork(),
    classes=("normal", "benign", "malignant"),
    preprocessing=ms.Preprocessing(size=(32, 32)),
)
method = ms.create_method("entropy_adaptive", pool, momentum=0.5)

for number, images in enumerate(your_batches(4), start=1):
    step = method.step(images)
    shares = ", ".join(f"{name} {share:.3f}" for name, share in zip(pool.names, step.encoder_coefficients, strict=True))
    answers = [pool.classes[k] for k in step.logits.argmax(dim=-1)[:3]]
    print(f"batch {number}: encoder from {shares}; head follows {step.head_expert}; first answers {answers}")
