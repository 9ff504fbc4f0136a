"""The lists of decoders that `eval.bench` knows by name."""

SHORT = "ar,scd:window=32,ssd_coupled,ssd_coupled:coupling=maximal:window=32"
CALIBRATED = "scd,ssd_coupled"
SMOKE = (
    "ar,sjd,scd,gumbel_fixed_point,mtp1d,ssd_coupled:drafts=chain,ssd_coupled:drafts=offsets,ssd,"
    "ssd:rows_in_flight=2,gsd,lantern"
)
"""Of `every`, what smoke=true runs: each decoder once with every kind of heads."""


def every() -> str:
    """All decoders over their settings; needs offset and chain heads."""
    chain = "ssd_coupled:drafts=chain"
    without_heads = [
        "ar",
        *(f"sjd:window={w}" for w in (16, 32)),
        *(f"sjd:window=16:initial={initial}" for initial in ("onehot", "left", "above")),
        *(f"scd:coupling={coupling}:window={w}" for coupling in ("maximal", "gumbel") for w in (8, 16, 32, 64)),
        "gumbel_fixed_point:window=32",
    ]
    with_heads = [
        "mtp1d",
        *(f"{chain}:window={w}" for w in (8, 16, 32, 48, 64)),
        *(f"{chain}:window={w}:sweeps=4" for w in (32, 48)),
        *(f"{chain}:coupling=maximal:window={w}" for w in (16, 32, 48)),
        f"{chain}:coupling=maximal:window=48:decay=0.35",
        *(f"ssd_coupled:drafts=offsets:window={w}" for w in (16, 32)),
    ]
    lossy = [
        *(f"ssd:rounds={r}" for r in (0, 1, 2, 3)),
        *("ssd:rounds=2:rows=2", "ssd:rounds=5:rows=2:staged=4"),
        *(f"ssd:rounds={r}:rows_in_flight={f}" for r, f in ((2, 2), (2, 3), (3, 2), (3, 4))),
        *(f"gsd:group={group}" for group in (10, 50)),
        *(f"lantern:delta={delta}" for delta in (0.05, 0.2)),
    ]
    return ",".join(without_heads + with_heads + lossy)
