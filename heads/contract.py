"""What a backbone promises (heads/backbones/base.py), measured on the backbone itself: the lines of heads.check.

Every promise is compared with something made another way: the Hugging Face model's own logits, a fresh forward, each
picture alone. Image tokens are random, so that no two cells look alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftgrid.heads.backbones.base import Backbone
from draftgrid.heads.distributions import at_least_fp32, mix_guidance
from draftgrid.heads.prompts import Prompt, Unconditional
from draftgrid.heads.tokenizers import ImageTokenizer

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest distance (see `Checks.apart`) that passes for rounding. A state of another cell is some tenths away."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}
PROMPTS = ("a red apple", "a big dog, looking left, beside a small blue cup on a wooden table, seen from above")
SHIFTS = (0, -1, 1, -2, 2)
"""Sequence places from where a state should sit at which it is looked for."""
SINGLES = 300
"""rows=0 reads so many tokens one by one, in whole rows."""
WINDOW = 1000
CHUNK = 512
"""Cells whose logits are held at a time."""
GUIDANCE = 3.0


@dataclass(frozen=True)
class Line:
    """One promise: whether it holds (None: it could not be checked), the figure, and what to do if it does not."""

    name: str
    ok: bool | None
    figure: str
    advice: str = ""

    def __str__(self) -> str:
        word = {True: "ok", False: "FAILED", None: "-"}[self.ok]
        return f"{word:<8}{self.name:<11}{self.figure}" + (f"\n{'':8}{self.advice}" if self.ok is False else "")


def emu3_logits(backbone: Backbone, tokens: Tensor, prompt: str, places: Tensor) -> Tensor:
    """Logits (N, V) of the Hugging Face model itself on the written-out ids, N slots after the prompt (-1: its end)."""
    names = [f"<|visual token {c:06d}|>" for c in range(backbone.image_vocab_size)]
    ids, codes, start = write_out(backbone, tokens, prompt, names, "<|extra_200|>")
    return backbone.model(input_ids=ids, use_cache=False, logits_to_keep=places + start).logits[0][:, codes]


def lumina_logits(backbone: Backbone, tokens: Tensor, prompt: str, places: Tensor) -> Tensor:
    """The same for Lumina-mGPT, whose class masks image logits: its own text model's output through its own LM head."""
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    names = [f"IMGIMG{c}Z".translate(letters) for c in range(backbone.image_vocab_size)]
    ids, codes, start = write_out(backbone, tokens, prompt, names, "<reserved08799>")
    states = backbone.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return backbone.model.lm_head(states[places + start])[:, codes]


def write_out(
    backbone: Backbone, tokens: Tensor, prompt: str, names: Sequence[str], row_end: str
) -> tuple[Tensor, Tensor, int]:
    """(ids (1, L) of prompt and picture (H, W), ids (V,) of the codes by their `names`, length of the prompt).

    The sequence is made here a second time, from the checkpoint's vocabulary, and not by the adapter.
    """
    vocabulary = backbone.model.config.vocabulary_map
    codes = torch.tensor([vocabulary[name] for name in names])
    rows = torch.nn.functional.pad(codes[tokens.cpu()], (0, 1), value=vocabulary[row_end])
    head = backbone.prompt_ids([prompt])[0].cpu()
    return torch.cat([head, rows.flatten()])[None].to(backbone.device), codes.to(backbone.device), len(head)


def janus_logits(backbone: Backbone, tokens: Tensor, prompt: str, places: Tensor) -> Tensor:
    """The same for Janus-Pro, whose LM head knows no codes: its text model on ids and embedded codes, its head."""
    model, head = backbone.model.model, backbone.prompt_ids([prompt])[0].to(backbone.device)
    codes = model.generation_aligner(model.generation_embeddings(tokens.flatten()))
    embeds = torch.cat([model.language_model.get_input_embeddings()(head), codes])[None]
    states = model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state[0]
    return model.generation_head(states[places + len(head)])


OWN_LOGITS: dict[str, Callable[[Backbone, Tensor, str, Tensor], Tensor]] = {
    "emu3": emu3_logits,
    "lumina_mgpt": lumina_logits,
    "janus_pro": janus_logits,
}
"""By adapter: the model's own logits, independent of the adapter."""


def relative(a: Tensor, b: Tensor) -> Tensor:
    """(..., N) -> (...): |a - b| / |b|; infinite where a value is not finite."""
    a, b = at_least_fp32(a), at_least_fp32(b)
    found = torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-30)
    return found.nan_to_num(nan=torch.inf)


def centred(logits: Tensor) -> Tensor:
    """Without the constant that a softmax does not see, in fp32 or better."""
    logits = at_least_fp32(logits)
    return logits - logits.mean(-1, keepdim=True)


class Checks:
    """A method for each line, named as the line; `reason` is why there is no tokenizer."""

    def __init__(self, backbone: Backbone, tokenizer: ImageTokenizer | None, reason: str, rows: int, seed: int) -> None:
        self.backbone, self.grid, self.image_tokenizer, self.reason = backbone, backbone.grid, tokenizer, reason
        self.tolerance = TOLERANCE.get(backbone.dtype, max(TOLERANCE.values()))
        self.dtype = str(backbone.dtype).removeprefix("torch.")
        H, W = self.grid.height, self.grid.width
        self.rows = min(rows or max(2, SINGLES // W), H)
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(backbone.image_vocab_size, (3, H, W), generator=generator).to(backbone.device)
        self.flat = self.tokens.flatten(1)
        self.prompt = PROMPTS[0]
        self.window = self.flat[:, : min(W + 1, self.grid.positions - 1)]
        """(3, L): a row and one token of the next, where there is one."""

    def measures(self) -> list[Callable[[], Line]]:
        """In the order of the report."""
        own = [self.logits, self.place] if self.backbone.adapter in OWN_LOGITS else [self.no_logits]
        states = [self.alignment, self.causality, self.batch, self.rollback, self.guidance, self.rounding]
        return [self.loads, self.frozen, *own, *states, self.tokenizer]

    def apart(self, h: Tensor, true: Tensor) -> Tensor:
        """(N, D) states -> (N,): the larger of the relative distances of the states and of their logits."""
        found = []
        for a, b in zip(h.split(CHUNK), true.split(CHUNK), strict=True):
            logits = (centred(self.backbone.logits(x)) for x in (a, b))
            found.append(torch.maximum(relative(a, b), relative(*logits)))
        return torch.cat(found)

    def worst(self, h: Tensor, true: Tensor) -> float:
        """The largest `apart` of states (..., D)."""
        return float(self.apart(h.flatten(0, -2), true.flatten(0, -2)).max())

    def states(self, tokens: Tensor, prompts: Sequence[str | None]) -> Tensor:
        """(B, H, W) -> (B, T, D)."""
        return self.backbone.states(tokens, prompts)[0].flatten(1, 2)

    def read(self, prompts: Sequence[Prompt], tokens: Tensor, guidance: float = 1.0) -> Tensor:
        """Decoding's states (G, B, L + 1, D) at and after tokens (B, L), read in one window."""
        state, h = self.backbone.start(prompts, guidance)  # type: ignore[arg-type]
        return torch.cat([h, self.backbone.forward(state, tokens, [0] * len(tokens))], dim=2)

    def fresh(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        """(k,) and (m,) codes -> (m, D): states after `tokens`, decoded from the start."""
        state, _ = self.backbone.start([self.prompt])
        if len(prefix):
            self.backbone.forward(state, prefix[None], [0])
        return self.backbone.forward(state, tokens[None], [len(prefix)])[0, 0]

    def cell(self, position: int) -> str:
        return f"h[{position // self.grid.width},{position % self.grid.width}]"

    def loads(self) -> Line:
        b, grid = self.backbone, self.grid
        text = (
            f"{b.name}: adapter {b.adapter}, grid {grid.height}x{grid.width} with {grid.row_end} structure tokens a "
            f"row, hidden size {b.hidden_size}, {b.image_vocab_size} codes, {sum(p.numel() for p in b.parameters()):,} "
            f"parameters, {self.dtype} on {b.device}, fingerprint {b.fingerprint[:16]}"
        )
        e = b.embed(self.flat[:1])
        sizes = {
            "embed gives vectors": (e.shape[-1], b.hidden_size),
            "logits gives codes": (b.logits(e).shape[-1], b.image_vocab_size),
            "structure_ids gives ids": (len(b.structure_ids()), grid.row_end),
            "prompt_ids gives prompts": (sum(len(i) > 0 for i in b.prompt_ids([*PROMPTS, None])), 3),
        }
        wrong = [f"{what} of {got}, not {want}" for what, (got, want) in sizes.items() if got != want]
        advice = f"{'; '.join(wrong)}: the adapter's attributes do not describe this checkpoint."
        return Line("loads", not wrong, text, advice)

    def frozen(self) -> Line:
        b = self.backbone
        training = sum(m.training for m in b.modules())
        trainable = sum(p.requires_grad for p in b.parameters())
        first, second = (self.states(self.tokens[:1], [self.prompt]) for _ in range(2))
        differ = self.worst(second, first)
        b.train()
        flipped = 0 if training else sum(m.training for m in b.modules())
        for module in b.modules():  # the lines below are about other things, so they are measured in eval mode
            module.training = False
        return Line(
            "frozen",
            not training and not trainable and not flipped and differ <= self.tolerance,
            f"{training} modules in train mode, {flipped} more after train(), {trainable} trainable tensors, "
            f"two forwards {differ:.1e} apart",
            "A backbone must be frozen and stay in eval mode, or dropout changes what heads are trained on: call "
            "backbone.freeze(), and look for what switches it back. The lines below are measured in eval mode.",
        )

    def no_logits(self) -> Line:
        return Line("logits", None, f"heads.check knows no independent reference for adapter {self.backbone.adapter}")

    @cached_property
    def own(self) -> tuple[Tensor, Tensor]:
        """Cells (N,), and how far their logits are from the model's own at the places SHIFTS away (5, N)."""
        b, grid = self.backbone, self.grid
        rows = sorted({*range(self.rows), grid.height - 1})
        cells = torch.cat([torch.arange(y * grid.width, (y + 1) * grid.width) for y in rows])
        h = self.states(self.tokens[:1], [self.prompt])[0, cells.to(b.device)]
        mine = torch.cat([centred(b.logits(part)) for part in h.split(CHUNK)])
        places = torch.stack([grid.slot(cells) - 1 + shift for shift in SHIFTS]).clamp(max=grid.slots - 1)
        asked, index = places.to(b.device).unique(return_inverse=True)
        true = centred(OWN_LOGITS[b.adapter](b, self.tokens[0], self.prompt, asked))
        return cells, torch.stack([relative(mine, true[i]).cpu() for i in index])

    def logits(self) -> Line:
        """A wrong norm or LM head: no place around a cell's own has its logits."""
        cells, distance = self.own
        near = float(distance.min(0).values.max())
        return Line(
            "logits",
            near <= self.tolerance,
            f"at most {near:.1e} from the model's own logits, {len(cells)} cells",
            "logits(h) is not what the model computes from h: is the final norm left out or applied twice, is h taken "
            "after it, are the head's image rows in the order of the codes?",
        )

    def place(self) -> Line:
        """A wrong place in the sequence: one around a cell's own has its logits."""
        cells, distance = self.own
        near, which = distance.min(0)
        astray = (near <= self.tolerance) & (distance[0] > self.tolerance)
        first = int(astray.int().argmax())
        shift = SHIFTS[int(which[first])]
        return Line(
            "place",
            not astray.any(),
            f"{int(astray.sum())} of {len(cells)} cells hold the state of another sequence place",
            f"{self.cell(int(cells[first]))} is the state {abs(shift)} place(s) {'after' if shift > 0 else 'before'} "
            "its own: it must be the state just before the token (y,x), at a row start that of the structure token.",
        )

    def alignment(self) -> Line:
        b, T, singles = self.backbone, self.grid.positions, self.rows * self.grid.width
        true = self.states(self.tokens[:1], [self.prompt])[0]
        state, h = b.start([self.prompt])
        found, at = [h[0, 0]], 0
        while at < T - 1:
            n = 1 if at < singles else min(WINDOW, T - 1 - at)
            found.append(b.forward(state, self.flat[:1, at : at + n], [at])[0, 0])
            at += n
        apart = self.apart(torch.cat(found), true)
        at, first = int(apart.argmax()), int((apart > self.tolerance).int().argmax())
        return Line(
            "alignment",
            bool(apart.max() <= self.tolerance),
            f"states and start/forward at most {float(apart.max()):.1e} apart ({self.cell(at)}), {T} cells, the first "
            f"{min(T, singles)} token by token",
            f"Training and decoding see different states, first at {self.cell(first)}: heads would be trained on one "
            "thing and used on another. Compare positions, mask and structure tokens.",
        )

    def causality(self) -> Line:
        """A changed token must change nothing up to its own cell, and must change the very next one."""
        W, T, V = self.grid.width, self.grid.positions, self.backbone.image_vocab_size
        true = self.states(self.tokens[:1], [self.prompt])[0]
        leak, deaf, asked = 0.0, [], sorted({0, W - 1, W, T // 2, T - 2} & set(range(T - 1)))
        for i in asked:
            changed = self.flat[:1].clone()
            changed[0, i] = (changed[0, i] + V // 2) % V
            h = self.states(changed.view_as(self.tokens[:1]), [self.prompt])[0]
            before = self.worst(h[: i + 1], true[: i + 1])
            leak = max(leak, before)
            if self.worst(h[i + 1 : i + 2], true[i + 1 : i + 2]) <= 4 * before:
                deaf.append(f"{self.cell(i + 1)} does not depend on the token before it")
        return Line(
            "causality",
            leak <= self.tolerance and not deaf,
            f"{len(asked)} tokens changed: states up to them move by {leak:.1e}, the next one in "
            f"{len(asked) - len(deaf)} of {len(asked)}",
            f"{[*deaf, 'a state sees its own token'][0]}: h is one cell off or the mask is not causal.",
        )

    def batch(self) -> Line:
        prompts = [*PROMPTS, None]
        alone = torch.cat([self.states(self.tokens[i : i + 1], [p]) for i, p in enumerate(prompts)])
        differ = max(self.worst(self.states(self.tokens, prompts), alone) for _ in range(2))
        each = [self.read([p], self.window[i : i + 1])[0] for i, p in enumerate(PROMPTS)]
        decoding = self.worst(self.read(PROMPTS, self.window[:2])[0], torch.cat(each))
        return Line(
            "batch",
            max(differ, decoding) <= self.tolerance,
            f"3 unequal prompts together and alone {differ:.1e} apart, while decoding {decoding:.1e}",
            "A picture depends on what else is in its batch: look at padding (positions must not count it, nothing may "
            "see it) and at what a second call finds left over from the first.",
        )

    def rollback(self) -> Line:
        b, W, T = self.backbone, self.grid.width, self.grid.positions
        if T < 3:
            return Line("rollback", None, f"a grid of {T} tokens leaves nothing to roll back")
        n = min(2 * W + 2, T - 2)
        right, wrong = self.flat[0], self.flat[1]
        keeps = sorted({n, n - 1, n // 2, 0} | ({W - 1, W, W + 1} & set(range(n))), reverse=True)

        def differ(*keeps: int) -> float:
            """Samples rolled back to their own places and read on, against a fresh forward of each."""
            m, zeros = min(2, T - 1 - max(keeps)), [0] * len(keeps)
            state, _ = b.start([self.prompt] * len(keeps))
            b.forward(state, torch.stack([torch.cat([right[:k], wrong[k:n]]) for k in keeps]), zeros)
            b.rollback(state, [*keeps])
            h = b.forward(state, torch.stack([right[k : k + m] for k in keeps]), [*keeps])[0]
            return max(self.worst(x, self.fresh(right[:k], right[k : k + m])) for x, k in zip(h, keeps, strict=True))

        worst, at = max((differ(keep), keep) for keep in keeps)
        ragged = differ(0, n)
        return Line(
            "rollback",
            max(worst, ragged) <= self.tolerance,
            f"{len(keeps)} rollbacks of {n} tokens at most {worst:.1e} from a fresh forward (keeping {at}), two "
            f"samples at different places {ragged:.1e}",
            "Keys of forgotten tokens are still seen, or positions continue from the wrong place: every decoder but AR "
            "would draw from another distribution than the model's. Look at the cache's crop and at the mask.",
        )

    def guidance(self) -> Line:
        b, tokens = self.backbone, self.window[:1]
        both = self.read([self.prompt], tokens, GUIDANCE)[:, 0]
        if both.shape[0] != 2:
            advice = "start must read both branches in one forward whenever guidance is not 1."
            return Line("guidance", False, f"start with guidance {GUIDANCE:g} gives {both.shape[0]} branch", advice)
        alone = torch.cat([self.read([p], tokens)[:, 0] for p in (self.prompt, Unconditional(self.prompt))])
        differ = self.worst(both[1], both[0])
        true = mix_guidance(b.logits(alone), GUIDANCE)
        mixed = float(relative(centred(mix_guidance(b.logits(both), GUIDANCE)), centred(true)).max())
        same = differ <= self.tolerance / 100
        return Line(
            "guidance",
            not same and mixed <= self.tolerance * (2 * GUIDANCE - 1),  # mixing multiplies rounding by so much
            f"branches {differ:.1e} apart, mixed logits {mixed:.1e} from two passes",
            "The unconditional branch reads the caption, so guidance does nothing: look at prompt_ids(None) and ids_of."
            if same
            else "A branch read together with the other is not what it is alone: look at start's order of rows.",
        )

    def rounding(self) -> Line:
        b, eps = self.backbone, torch.finfo(self.backbone.dtype).eps
        prompt = b.embed_ids(b.prompt_ids([self.prompt])[0].to(b.device))[None]
        embeds = torch.cat([prompt, b.embed(self.flat[:1, : self.rows * self.grid.width])], dim=1)
        sign = torch.randint(2, embeds.shape, generator=torch.Generator().manual_seed(0)).to(embeds) * 2 - 1
        positions = torch.arange(embeds.shape[1], device=b.device)[None]
        h, shaken = (b.trunk(x, positions, None, None)[0] for x in (embeds, embeds * (1 + eps * sign)))
        differ = self.worst(shaken, h)
        return Line(
            "rounding",
            differ <= self.tolerance,
            f"inputs changed in their last bit move states by {differ:.1e}; the tolerance of all lines is "
            f"{self.tolerance:g} in {self.dtype}",
            f"In {self.dtype} this model's rounding hides what the lines above look for: check it with a wider dtype= "
            "and look for values that overflow.",
        )

    def tokenizer(self) -> Line:
        tokenizer = self.image_tokenizer
        if tokenizer is None:
            return Line("tokenizer", None, f"none here, so pictures can be neither encoded nor shown ({self.reason})")
        V, (H, W), tokens = self.backbone.image_vocab_size, self.tokens.shape[1:], self.tokens[:1]
        codes, side = tokenizer.codebook_size, (H * tokenizer.patch, W * tokenizer.patch)
        wrong = [] if codes == V else [f"it has {codes} codes, the backbone {V}"]
        if not tokenizer.decodes and not wrong:
            shape = tuple(tokenizer.encode(torch.full((1, 3, *side), 0.5)).shape[1:])
            figure = f"{type(tokenizer).__name__}: {codes} codes, no pixel decoder: pictures can be encoded, not shown"
            return Line("tokenizer", None if shape == (H, W) else False, figure, f"encode gives {shape}, not {(H, W)}")
        tokens = tokens.clamp(max=codes - 1)
        picture = tokenizer.decode(tokens)
        if picture.shape != (1, 3, *side):
            wrong.append(f"decode gives {tuple(picture.shape)}, not (1, 3, {side[0]}, {side[1]})")
        if not (picture.min() >= 0 and picture.max() <= 1):
            wrong.append(f"pixels reach {float(picture.min()):.2g}..{float(picture.max()):.2g}, not 0..1")
        again = tokenizer.encode(picture)
        if again.shape != tokens.shape:
            wrong.append(f"encode gives {tuple(again.shape)}, not {tuple(tokens.shape)}")
        elif not (again.min() >= 0 and again.max() < codes):
            wrong.append(f"encode gives codes {int(again.min())}..{int(again.max())} of 0..{codes - 1}")
        share = f"{float((again == tokens.to(again)).float().mean()):.0%}" if again.shape == tokens.shape else "none"
        return Line(
            "tokenizer",
            not wrong,
            f"{type(tokenizer).__name__}: {codes} codes, pictures of {side[0]}x{side[1]}, {share} of random codes come "
            "back from encode(decode(tokens)) (a learned tokenizer need not be idempotent)",
            f"{'; '.join(wrong)}: is this the image tokenizer the backbone was trained with?",
        )
