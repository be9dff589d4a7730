"""Foreign checkpoints (timm, torchvision, Hugging Face, MONAI, plain state dicts) made into experts."""
