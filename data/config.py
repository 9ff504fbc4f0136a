"""Settings of the training stream."""

from dataclasses import dataclass

from draftgrid.common.cli import check_ranges, key


@dataclass
class StreamConfig:
    dir: str = key("", "folder or URL (s3://, gs://, hf://, http://) with the shard sets train/ and validation/")
    mix: dict[str, float] = key(dict, "more shard sets to train on, {place: weight}; dir/train weighs 1", above=0)
    source: str = key("", "what to encode if dir is still empty, as data.encode takes it; '' = never encode")
    copies: int = key(1, "emoji only: copies of a training picture when encoding, the original included", least=1)
    shards: int = key(16, "shard files when encoding", least=1)
    batch_size: int = key(8, "pictures per rank and step", least=1)
    validation_samples: int = key(0, "validate on the first N samples; 0 = all", least=0)
    workers: int = key(1, "loader processes per rank; 0 = in the training process", least=0)
    cache: str = key("", "folder that keeps fetched remote shards; '' = each is fetched whenever it is read")
    cache_gb: float = key(50.0, "limit of the cache, in 10^9 bytes", above=0)
    caption_dropout: float = key(0.1, "share of captions replaced by the unconditional prompt", least=0, most=1)

    def check(self) -> None:
        """Raises ValueError naming the field."""
        if not self.dir:
            raise ValueError("data.dir is empty; name the folder that holds (or shall hold) the shard sets")
        check_ranges(self, "data.")
