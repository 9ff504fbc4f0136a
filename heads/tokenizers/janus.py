"""Janus-Pro's picture tokenizer (LlamaGen's VQ-16, arXiv 2406.06525) through transformers' JanusVQVAE.

Only the tensors under `vqmodel.` are read, so the language model beside them costs neither time nor memory. Codes are
matched by angle, as in the release (github.com/deepseek-ai/Janus, janus/models/vq_model.py: states and codebook are
normalised first, and decoding reads normalised vectors); transformers' own encode compares them unnormalised, which
gives other codes than the model was trained on.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.files import read_json, write_json
from heads.tokenizers.base import ImageTokenizer
from heads.tokenizers.patch_vq import nearest
from heads.weights import read_tensors

PREFIX = "vqmodel."
SIDE = 384
"""Pixels of Janus-Pro's own pictures, 24 x 24 codes of 16 x 16 pixels."""


class JanusVQ(ImageTokenizer):
    model_types = ("janus", "janus_vqgan")

    def __init__(self, model: Any, mean: list[float], std: list[float], image_size: int = SIDE) -> None:
        """`mean` and `std` per channel: what pictures in [0, 1] are normalised with."""
        self.model, self.image_size = model.eval().requires_grad_(False), image_size
        self.patch = 2 ** (len(model.config.channel_multiplier) - 1)
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (mean, std))

    @property
    def codebook(self) -> Tensor:
        """(K, C), each of length 1."""
        return nn.functional.normalize(self.model.quantize.embedding.weight, dim=-1)

    @property
    def fingerprint(self) -> str:
        """The encoder's last weights and the normalisation decide about the codes too."""
        digest = hashlib.sha256(super().fingerprint.encode())
        for tensor in (self.mean, self.std, *self.model.quant_conv.parameters()):
            digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: str | torch.device) -> "JanusVQ":
        self.model.to(device)
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        if images.shape[-1] % self.patch or images.shape[-2] % self.patch:
            raise ValueError(
                f"picture of {tuple(images.shape[-2:])} pixels does not divide into {self.patch}x{self.patch}"
            )
        normalised = (images.to(self.mean) - self.mean) / self.std
        z = self.model.quant_conv(self.model.encoder(normalised)).permute(0, 2, 3, 1)
        unit = nn.functional.normalize(z, dim=-1)
        return nearest(unit.flatten(0, 2), self.codebook, chunk=4096).view(z.shape[:3])

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        z = self.codebook[tokens.to(self.mean.device)].permute(0, 3, 1, 2)
        pictures = self.model.decoder(self.model.post_quant_conv(z))
        return (pictures.float() * self.std + self.mean).clamp(0, 1)

    def save_pretrained(self, folder: str | Path) -> None:
        self.model.save_pretrained(folder)
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        size = {"height": self.image_size, "width": self.image_size}
        write_json(Path(folder) / "preprocessor_config.json", {"image_mean": mean, "image_std": std, "size": size})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "JanusVQ":
        """Raises ValueError if there are no such weights, or they lack a key, or have one too many."""
        from transformers import JanusVQVAE, JanusVQVAEConfig

        folder = Path(folder)
        config = read_json(folder / "config.json")
        mean, std, side = [0.5] * 3, [0.5] * 3, SIDE  # Janus-Pro's own
        # Published checkpoints have them in the first, those that transformers 5 writes in the second, which wins.
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (folder / name).is_file():
                processor = read_json(folder / name)
                processor = processor.get("image_processor", processor)
                mean, std = processor.get("image_mean", mean), processor.get("image_std", std)
                side = (processor.get("size") or {}).get("height", side)
        whole = config["model_type"] == "janus"
        stored = read_tensors(folder, (lambda name: PREFIX in name) if whole else (lambda _: True))
        state = {name.partition(PREFIX)[2] if whole else name: tensor.float() for name, tensor in stored.items()}
        if not state:
            raise ValueError(f"{folder} holds no weights of a picture tokenizer (safetensors with {PREFIX}...)")
        model = JanusVQVAE(JanusVQVAEConfig.from_dict(config["vq_config"] if whole else config))
        try:
            missing, unknown = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder}: picture tokenizer does not have the sizes of config.json: {reason}") from None
        if missing or unknown:
            raise ValueError(f"{folder}: picture tokenizer lacks {missing[:3]} and has unknown {unknown[:3]}")
        return cls(model, mean, std, side)
