"""Emu3's vision tokenizer (arXiv 2409.18869) through transformers' Emu3VQVAE, read from an Emu3 checkpoint.

Only the tensors under `vqmodel.` are read, so the language model beside them costs neither time nor memory.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heads.files import read_json, write_json
from heads.tokenizers.base import ImageTokenizer

PREFIX = "vqmodel."
SIDE = 720
"""Pixels of Emu3's own pictures, 90 x 90 codes of 8 x 8 pixels."""


class Emu3VQ(ImageTokenizer):
    model_types = ("emu3", "emu3_vqgan")

    def __init__(self, model: Any, mean: list[float], std: list[float], image_size: int = SIDE) -> None:
        """`mean` and `std` per channel: what pictures in [0, 1] are normalised with."""
        self.model, self.image_size = model.eval().requires_grad_(False), image_size
        self.patch = model.spatial_scale_factor
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (mean, std))

    @property
    def codebook(self) -> Tensor:
        return self.model.quantize.embedding.weight

    @property
    def fingerprint(self) -> str:
        """The encoder's last weights and the normalisation decide about the codes too."""
        digest = hashlib.sha256(super().fingerprint.encode())
        for tensor in (self.mean, self.std, *self.model.quant_conv.parameters()):
            digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: str | torch.device) -> "Emu3VQ":
        self.model.to(device)
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Tensor:
        if images.shape[-1] % self.patch or images.shape[-2] % self.patch:
            raise ValueError(
                f"picture of {tuple(images.shape[-2:])} pixels does not divide into {self.patch}x{self.patch}"
            )
        sizes = torch.tensor([images.shape[-2:]] * len(images))
        normalised = (images.to(self.mean.device) - self.mean) / self.std
        return torch.stack(list(self.model.encode(normalised, sizes).image_tokens))

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        pictures = self.model.decode(tokens.to(self.mean.device))
        return (pictures.float() * self.std + self.mean).clamp(0, 1)

    def save_pretrained(self, folder: str | Path) -> None:
        self.model.save_pretrained(folder)
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        size = {"height": self.image_size, "width": self.image_size}
        write_json(Path(folder) / "preprocessor_config.json", {"image_mean": mean, "image_std": std, "size": size})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Emu3VQ":
        """Raises ValueError if there are no such weights, or they lack a key, or have one too many."""
        from transformers import Emu3VQVAE, Emu3VQVAEConfig

        folder = Path(folder)
        config = read_json(folder / "config.json")
        mean, std, side = [0.5] * 3, [0.5] * 3, SIDE  # Emu3's own
        # Published checkpoints have them in the first, those that transformers 5 writes in the second, which wins.
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (folder / name).is_file():
                processor = read_json(folder / name)
                processor = processor.get("image_processor", processor)
                mean, std = processor.get("image_mean", mean), processor.get("image_std", std)
                side = (processor.get("size") or {}).get("height", side)
        whole = config["model_type"] == "emu3"
        model = Emu3VQVAE(Emu3VQVAEConfig.from_dict(config["vq_config"] if whole else config))
        state = cls._weights(folder, whole)
        try:
            missing, unknown = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder}: vision tokenizer does not have the sizes of config.json: {reason}") from None
        if missing or unknown:
            raise ValueError(f"{folder}: vision tokenizer lacks {missing[:3]} and has unknown {unknown[:3]}")
        card = read_json(folder / "draftgrid.json") if (folder / "draftgrid.json").is_file() else {}
        side = card["grid"][0] * model.spatial_scale_factor if "grid" in card else side
        return cls(model, mean, std, side)

    @staticmethod
    def _weights(folder: Path, whole: bool) -> dict[str, Tensor]:
        files = sorted(folder.glob("*.safetensors"))
        if (folder / "model.safetensors.index.json").is_file():
            index = read_json(folder / "model.safetensors.index.json")["weight_map"]
            files = sorted({folder / file for name, file in index.items() if not whole or PREFIX in name})
        state = {}
        try:
            for file in files:
                with safe_open(file, "pt") as held:
                    for name in held.keys():  # noqa: SIM118 - not a dict
                        if not whole or PREFIX in name:
                            state[name.partition(PREFIX)[2] if whole else name] = held.get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder} holds damaged weights: {error}") from None
        if not state:
            raise ValueError(f"{folder} holds no weights of a vision tokenizer (safetensors with {PREFIX}...)")
        return state
