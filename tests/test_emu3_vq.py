"""Emu3's vision tokenizer, out of checkpoints written by transformers itself at tiny size."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Emu3Config, Emu3ForConditionalGeneration, Emu3ImageProcessor, Emu3VQVAE, Emu3VQVAEConfig

from draftgrid.data.encode import EncodeConfig, run
from draftgrid.data.shards import Sample, read_manifest
from draftgrid.data.sources import Item, open_picture, pixels
from draftgrid.heads.tokenizers import Emu3VQ, load_tokenizer
from tests.data_fixtures import read_shard, write_pictures
from tests.tiny import tiny_emu3

SIZE = {
    "codebook_size": 24,
    "embed_dim": 4,
    "latent_channels": 4,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "hidden_size": 32,
    "num_attention_heads": 1,
}


@pytest.fixture(scope="module")
def model() -> Emu3VQVAE:
    torch.manual_seed(0)
    model = Emu3VQVAE(Emu3VQVAEConfig(**SIZE)).eval()
    with torch.no_grad():
        model.quantize.embedding.weight.normal_()
    return model


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(3, 3, 16, 24, generator=torch.Generator().manual_seed(1))


def whole_checkpoint(model: Emu3VQVAE, folder: Path, shards: int = 1) -> Path:
    """Weights as an Emu3 for generation keeps them: `model.vqmodel.` beside the language model's."""
    folder.mkdir()
    state = {f"model.vqmodel.{k}": v.contiguous() for k, v in model.state_dict().items()}
    state["model.text_model.embed_tokens.weight"] = torch.zeros(5, 2)
    state["lm_head.weight"] = torch.zeros(5, 2)
    names = sorted(state)
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: state[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"model_type": "emu3", "vq_config": model.config.to_dict()}))
    return folder


@pytest.mark.parametrize("layout", ["alone", "whole", "whole in shards"])
def test_codes_and_pictures_are_transformers_own(
    model: Emu3VQVAE, images: torch.Tensor, tmp_path: Path, layout: str
) -> None:
    if layout == "alone":
        model.save_pretrained(tmp_path / "vq")
    else:
        whole_checkpoint(model, tmp_path / "vq", 3 if "shards" in layout else 1)
    tokenizer = load_tokenizer(tmp_path / "vq")
    assert isinstance(tokenizer, Emu3VQ) and (tokenizer.patch, tokenizer.codebook_size) == (2, 24)
    codes = tokenizer.encode(images)
    sizes = torch.tensor([[16, 24]] * 3)
    with torch.no_grad():
        expected = torch.stack(model.encode((images - 0.5) / 0.5, sizes).image_tokens)
        pictures = (model.decode(expected) * 0.5 + 0.5).clamp(0, 1)
    assert codes.shape == (3, 8, 12) and torch.equal(codes, expected) and len(codes.unique()) > 3
    torch.testing.assert_close(tokenizer.decode(codes), pictures)
    assert tokenizer.pil(codes)[0].size == (24, 16)


@pytest.mark.parametrize("resaved", [False, True])
def test_normalisation_is_the_checkpoints(
    model: Emu3VQVAE, images: torch.Tensor, tmp_path: Path, resaved: bool
) -> None:
    """Saved again by transformers 5, a published checkpoint has both files; transformers reads the newer one."""
    model.save_pretrained(tmp_path)
    mean, std = [0.2, 0.3, 0.4], [0.5, 0.25, 0.125]
    right, other = {"image_mean": mean, "image_std": std}, {"image_mean": [0.9] * 3, "image_std": [0.9] * 3}
    newer = {"image_processor": right, "processor_class": "Emu3Processor"} if resaved else {"processor_class": "x"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(other if resaved else right))
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    shifted = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        expected = torch.stack(model.encode(shifted, torch.tensor([[16, 24]] * 3)).image_tokens)
    assert torch.equal(load_tokenizer(tmp_path).encode(images), expected)


def test_a_missing_weight_is_named_and_a_wrong_size_refused(model: Emu3VQVAE, tmp_path: Path) -> None:
    folder = whole_checkpoint(model, tmp_path / "vq")
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    lost = next(name for name in state if "quant_conv" in name)
    save_file({k: v for k, v in state.items() if k != lost}, file)
    with pytest.raises(
        ValueError, match=rf"picture tokenizer's weights .* missing \['{lost.removeprefix('model.vqmodel.')}'\]"
    ):
        load_tokenizer(folder)
    save_file({"lm_head.weight": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="holds no weights of a picture tokenizer"):
        load_tokenizer(folder)
    model.save_pretrained(tmp_path / "alone")
    with pytest.raises(ValueError, match="does not divide into 2x2"):
        load_tokenizer(tmp_path / "alone").encode(torch.zeros(1, 3, 15, 16))


def test_a_folder_of_pictures_is_encoded_with_it(model: Emu3VQVAE, tmp_path: Path) -> None:
    folder = whole_checkpoint(model, tmp_path / "vq")
    pictures = write_pictures(tmp_path / "pictures", 5, size=40)
    keys = {"source": f"folder:{pictures}", "tokenizer": str(folder), "split": "all", "out": str(tmp_path / "out")}
    with pytest.raises(ValueError, match="size is 31x31; this tokenizer needs multiples of 2 pixels"):
        run(EncodeConfig(**keys, size="31"))
    run(EncodeConfig(**keys, size="32", shards=1))
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.grid, manifest.codes, manifest.samples) == ((16, 16), 24, 5)
    tokenizer = load_tokenizer(folder)
    assert manifest.tokenizer == tokenizer.fingerprint
    for sample in read_shard(tmp_path / "out" / manifest.shards[0].file):
        assert isinstance(sample, Sample)
        file = pictures / sample.metadata["file"]
        with Image.open(file) as opened:
            assert opened.size == (40, 40)
        expected = tokenizer.encode(pixels([open_picture(Item("x", "", file), 32)]))[0]
        assert sample.tokens.tolist() == expected.tolist()


@pytest.fixture(scope="module", params=["5GB", "60KB"])
def published(model: Emu3VQVAE, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it, in one file or in many, with the processor's own normalisation."""
    folder = tmp_path_factory.mktemp("published")
    backbone = tiny_emu3((4, 4))
    config = Emu3Config(**{**backbone.model.config.to_dict(), "vq_config": model.config.to_dict()})
    whole = Emu3ForConditionalGeneration(config)
    whole.load_state_dict(backbone.model.state_dict(), strict=False)
    whole.model.vqmodel.load_state_dict(model.state_dict())
    whole.save_pretrained(folder, max_shard_size=request.param)
    assert (len(list(folder.glob("*.safetensors"))) > 5) == (request.param == "60KB")
    backbone.processor.save_pretrained(folder)
    return folder


def test_a_picture_has_the_codes_and_pixels_of_transformers_whole_model(published: Path, tmp_path: Path) -> None:
    """Through its image processor, whose mean is not 0.5, and its map of codes to vocabulary ids."""
    write_pictures(tmp_path, 1, size=24)
    picture = Image.open(tmp_path / "000.png")
    processor = Emu3ImageProcessor.from_pretrained(published)
    assert processor.image_mean[0] != 0.5
    inputs = processor(picture, do_resize=False, return_tensors="pt")
    whole = Emu3ForConditionalGeneration.from_pretrained(published).eval()
    ids = whole.model.get_image_tokens(inputs["pixel_values"], inputs["image_sizes"])
    expected = whole.model.vocabulary_mapping.convert_bpe2img(ids.view(1, 12, 13))
    tokenizer = load_tokenizer(published)
    codes = tokenizer.encode(pixels([picture]))
    assert codes.tolist() == expected.tolist() and len(codes.unique()) > 3
    drawn = whole.model.decode_image_tokens(torch.cat([ids[None], torch.zeros(1, 3, dtype=torch.long)], 1), 12, 12)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (processor.image_mean, processor.image_std))
    torch.testing.assert_close(tokenizer.decode(codes), (drawn * std + mean).clamp(0, 1))


def test_a_tokenizer_saved_and_loaded_again_is_the_same_one(
    published: Path, images: torch.Tensor, tmp_path: Path
) -> None:
    first = load_tokenizer(published)
    first.image_size = 96
    first.save_pretrained(tmp_path / "image_tokenizer")
    second = load_tokenizer(tmp_path)
    assert torch.equal(first.encode(images), second.encode(images))
    codes = first.encode(images)
    assert torch.equal(first.decode(codes), second.decode(codes))
    assert (second.image_size, second.patch, second.fingerprint) == (96, 2, first.fingerprint)


def test_weights_of_another_size_are_one_sentence(model: Emu3VQVAE, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"codebook_size": 25}))
    with pytest.raises(ValueError, match=rf"^{tmp_path}: .*quantize\.embedding\.weight[^\n]*$"):
        load_tokenizer(tmp_path)


def test_a_checkpoint_without_its_pixel_decoder_holds_no_tokenizer(tmp_path: Path) -> None:
    tiny_emu3((4, 4)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no weights of a picture tokenizer \(safetensors with vqmodel\."):
        load_tokenizer(tmp_path)
