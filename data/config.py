"""Settings of the training stream."""

from dataclasses import dataclass

from draftgrid.common.cli import key


@dataclass
class StreamConfig:
    dir: str = key("", "folder or URL (s3://, gs://, hf://, http://) with the shard sets train/ and validation/")
    mix: dict[str, float] = key(dict, "more shard sets to train on, {place: weight}; dir/train itself weighs 1")
    source: str = key("", "what to encode if dir is still empty, as data.encode takes it; '' = never encode")
    copies: int = key(1, "emoji only: copies of a training picture when encoding, the original included")
    shards: int = key(16, "shard files when encoding")
    batch_size: int = key(8, "pictures per rank and step")
    validation_samples: int = key(0, "validate on the first N samples; 0 = all")
    workers: int = key(1, "loader processes per rank; 0 = in the training process")
    cache: str = key("", "folder that keeps fetched remote shards; '' = each is fetched whenever it is read")
    cache_gb: float = key(50.0, "the cache is kept below so many 10^9 bytes")
    caption_dropout: float = key(0.1, "share of captions replaced by the unconditional prompt")

    def check(self) -> None:
        """Raises ValueError naming the field."""
        if not self.dir:
            raise ValueError("data.dir is empty; name the folder that holds (or shall hold) the shard sets")
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size is {self.batch_size}; at least 1 is needed")
        if self.workers < 0:
            raise ValueError(f"data.workers is {self.workers}; use 0 (none) or more")
        if self.validation_samples < 0:
            raise ValueError(f"data.validation_samples is {self.validation_samples}; use 0 (all) or more")
        for place, weight in self.mix.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"data.mix gives {place} the weight {weight}; it must be positive")
        if self.cache_gb <= 0:
            raise ValueError(f"data.cache_gb is {self.cache_gb}; it must be positive")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"data.caption_dropout is {self.caption_dropout}; it is a share between 0 and 1")
