"""Self-distillation: prompts -> token shards of the backbone's own pictures, for `data.mix` or a data set of its own.

Only exact decoders, whose pictures have the backbone's own distribution. Pictures are drawn in blocks of `batch_size`,
each kept as soon as it is drawn, so that the same command resumes where a killed one stopped, to the same bytes; under
torchrun process r of n draws blocks r, r + n, ...
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from draftgrid.common.files import atomic
from draftgrid.data.encode import PARTS, claim, give_sign, processes, tidy, wait_for_plan, wait_until
from draftgrid.data.shards import MANIFEST, Manifest, Sample, read_manifest, shard_name, write_shard
from draftgrid.eval.decoders.engine import RowCallback
from draftgrid.eval.setup import DecoderSpec, Loaded
from draftgrid.heads.mtp import MTPHeads


def check_exact(decoder: DecoderSpec) -> None:
    """Raises ValueError for a decoder whose pictures are not distributed as the backbone's own."""
    if not decoder.exact:
        right = "save=shards needs an exact one (ar, scd, ssd_coupled, ...)"
        raise ValueError(f"decoder {decoder.text} is lossy: its pictures are not the backbone's own; {right}")


def distill(
    loaded: Loaded, decoder: DecoderSpec, out: Path, *, seed: int, batch_size: int, shards: int, overwrite: bool = False
) -> Manifest | None:
    """Draw one picture per prompt into a shard set at `out`. Returns the manifest (process 0), or None.

    Raises ValueError if the decoder is lossy or `out` holds something else.
    """
    check_exact(decoder)
    rank, world, _ = processes()
    prompts = loaded.prompts
    settings = {
        "backbone": loaded.backbone.fingerprint,
        "decoder": decoder.text,
        "heads": {kind: _digest(heads) for kind, heads in loaded.heads.items()},
        **asdict(loaded.sampling),
        "seed": seed,
    }
    plan: dict[str, Any] = settings | {
        "weights": _sampled(loaded.backbone),
        "tokenizer": loaded.tokenizer.fingerprint,
        "prompts": f"{len(prompts)}:{hashlib.sha256(chr(10).join(prompts).encode()).hexdigest()}",
        "batch_size": batch_size,  # a sum is rounded in another order in another batch
        "shards": min(shards, len(prompts)),
    }
    if rank == 0:
        claim(out, plan, overwrite, "choose another out, or overwrite=true")
    else:
        wait_for_plan(out, plan)
    blocks = [range(i, min(i + batch_size, len(prompts))) for i in range(0, len(prompts), batch_size)]
    if not (out / MANIFEST).is_file():
        _draw(loaded, decoder, out, seed, blocks[rank::world], lambda *_: give_sign(out, rank))
    if rank > 0:
        return None
    if not (out / MANIFEST).is_file():
        for path in (_block(out, b) for b in blocks):
            wait_until(out, path.is_file, f"{PARTS}/{path.name}")
        _pack(loaded, out, settings, blocks, plan["shards"])
    tidy(out)
    return read_manifest(out)


def _digest(heads: MTPHeads) -> str:
    """Pictures of an exact decoder have one distribution with any heads, but not the same bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(heads.state_dict().items()):
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _sampled(backbone: nn.Module, most: int = 1024) -> str:
    """Digest of up to `most` numbers of each weight: unlike the fingerprint of heads, it sees a finetuned layer."""
    digest = hashlib.sha256()
    for name, tensor in sorted(backbone.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        if not tensor.is_meta:  # offloaded weights lie elsewhere
            some = tensor.detach().flatten()[:: max(1, tensor.numel() // most)]
            digest.update(some.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def _block(out: Path, numbers: range) -> Path:
    return out / PARTS / f"block-{numbers.start:08d}.npy"


def _draw(
    loaded: Loaded, decoder: DecoderSpec, out: Path, seed: int, blocks: Sequence[range], sign: RowCallback
) -> None:
    """Those of the blocks that are not there yet, with a sign of life after every row."""
    with tqdm(total=sum(map(len, blocks)), desc=f"draw with {decoder.name}", unit="img") as bar:
        for numbers in blocks:
            if not _block(out, numbers).is_file():
                if (out / MANIFEST).is_file():  # process 0 finished meanwhile, and has removed the parts
                    return
                tokens = loaded.draw(decoder, numbers, seed, sign).tokens.cpu().numpy()
                with atomic(_block(out, numbers)) as temporary, open(temporary, "wb") as file:
                    np.save(file, tokens.astype(np.uint32))
            bar.update(len(numbers))


def _pack(loaded: Loaded, out: Path, settings: dict, blocks: Sequence[range], shards: int) -> None:
    """Blocks -> shards and the manifest, one shard's pictures in memory at a time."""
    codes, prompts = loaded.tokenizer.codebook_size, loaded.prompts
    size = len(blocks[0])
    done = []
    for index, part in enumerate(np.array_split(np.arange(len(prompts)), shards)):
        samples = []
        for numbers in blocks[part[0] // size : part[-1] // size + 1]:
            for i, tokens in zip(numbers, np.load(_block(out, numbers)), strict=True):
                if part[0] <= i <= part[-1]:
                    samples.append(Sample(f"{i:08d}", tokens, prompts[i], {"source": "self", "number": i}))
        done.append(write_shard(out / shard_name(index), samples, codes))
    grid = loaded.backbone.grid.height, loaded.backbone.grid.width
    source, license = f"self:{loaded.backbone.name}", "that of the backbone's pictures"
    fingerprint = loaded.tokenizer.fingerprint
    Manifest(grid, fingerprint, codes, source, license, "train", tuple(done), sampling=settings).save(out)
