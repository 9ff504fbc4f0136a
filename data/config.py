"""Settings of the training stream."""

from dataclasses import dataclass

from heads.cli import key


@dataclass
class StreamConfig:
    dir: str = key("", "folder with the shard sets train/ and validation/")
    source: str = key("", "where pictures come from if dir is still empty: emoji or folder:PATH; '' = never encode")
    copies: int = key(1, "emoji only: copies of a training picture when encoding, the original included")
    shards: int = key(16, "shard files when encoding")
    batch_size: int = key(8, "pictures per rank and step")
    validation_samples: int = key(0, "validate on the first N samples; 0 = all")
    workers: int = key(1, "loader processes per rank; 0 = in the training process")
    caption_dropout: float = key(0.1, "share of captions replaced by the unconditional prompt")

    def check(self) -> None:
        """Raises ValueError naming the field."""
        if not self.dir:
            raise ValueError("data.dir is empty; name the folder that holds (or shall hold) the shard sets")
        if self.batch_size < 1:
            raise ValueError(f"data.batch_size is {self.batch_size}; at least 1 is needed")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"data.caption_dropout is {self.caption_dropout}; it is a share between 0 and 1")
