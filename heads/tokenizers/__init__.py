"""Image tokenizers: pictures <-> grids of codes, loaded without any language model."""

from draftgrid.heads.tokenizers.base import ImageTokenizer
from draftgrid.heads.tokenizers.chameleon import ChameleonVQ
from draftgrid.heads.tokenizers.emu3 import Emu3VQ
from draftgrid.heads.tokenizers.janus import JanusVQ
from draftgrid.heads.tokenizers.loading import load_tokenizer
from draftgrid.heads.tokenizers.patch_vq import PatchVQ

__all__ = ["ChameleonVQ", "Emu3VQ", "ImageTokenizer", "JanusVQ", "PatchVQ", "load_tokenizer"]
