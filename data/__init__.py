"""Pictures and captions become token shards, and token shards become a training stream."""

SPLITS = ("train", "validation", "test")
