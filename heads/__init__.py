"""What has weights: backbones, image tokenizers and the drafting heads, their loss, and the check of a backbone."""
