"""Import of checkpoints from timm, torchvision, Hugging Face, MONAI and plain state dicts as experts."""
