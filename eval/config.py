"""Settings of decoding in a recipe: plain dataclasses, so that reading a recipe loads no model."""

from dataclasses import dataclass

from draftgrid.common.cli import check_ranges, key


@dataclass
class DecodingConfig:
    """The one place where a recipe says how its heads will be used."""

    guidance: float = key(1.0, "guidance scale the heads are for: of the sheet, of validation, of pictures on the way")
    top_k: int = key(0, "of all drawing: keep the k most likely tokens; 0 = all", least=0)


@dataclass
class EvaluateConfig:
    eval_every: int = key(0, "steps between drawing validation prompts with the heads as they are; 0 = never", least=0)
    images: int = key(8, "prompts that are drawn", least=1)
    prompts: str = key("", "text file of prompts, or emoji:validation; '' = captions of the validation set")
    decoders: str = key("ar,ssd,ssd_coupled", "what draws them; those that cannot draft with the heads are left out")
    batch_size: int = key(4, "pictures drawn together; with guidance each takes two branches and a cache", least=1)

    def check(self, kind: str) -> None:
        """`kind` of heads. Raises ValueError naming the field."""
        check_ranges(self, "evaluate.")
        if not self.eval_every:
            return
        from draftgrid.eval.setup import parse_decoders

        try:
            decoders = parse_decoders(self.decoders)
        except ValueError as error:
            raise ValueError(f"evaluate.decoders: {error}") from None
        texts = [decoder.text for decoder in decoders]
        if len(set(texts)) < len(texts):
            raise ValueError(f"evaluate.decoders is {self.decoders!r}; each once is enough")
        if not any(kind in decoder.kinds for decoder in decoders):
            raise ValueError(f"evaluate.decoders is {self.decoders!r}, but none of them drafts with {kind} heads")
