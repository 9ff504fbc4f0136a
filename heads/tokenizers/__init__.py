"""Image tokenizers: pictures <-> grids of codes, loaded without any language model."""

from heads.tokenizers.base import ImageTokenizer, load_tokenizer
from heads.tokenizers.chameleon import ChameleonVQ
from heads.tokenizers.emu3 import Emu3VQ
from heads.tokenizers.janus import JanusVQ
from heads.tokenizers.patch_vq import PatchVQ

__all__ = ["ChameleonVQ", "Emu3VQ", "ImageTokenizer", "JanusVQ", "PatchVQ", "load_tokenizer"]
