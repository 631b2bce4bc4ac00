"""Orders in sentences of the pages, as `a` < `b`, are those that the results say are shown."""

import json

import pytest
from test_pages import ROOT, prose

RESULTS = ROOT / "benchmarks" / "results"

# What a page says, of which results, the orders in it that are shown, and those that are not.
UNTUNED, TUNED = "untuned, one factor for 2048", "after 400 steps, one factor for 4096"
ORDERS = {
    "long-context.md: untuned, at 4 times": (
        "Untuned at 4 times the length every seed shows `window` < `yarn` < `ntk` < `none`, and `yarn`, `ntk` < "
        "`linear`; `none` < `linear` is not shown.",
        ("extensions", f"{UNTUNED}, at 2048"),
        ["window < yarn", "yarn < ntk", "ntk < none", "yarn < linear", "ntk < linear"],
        ["none < linear"],
    ),
    "long-context.md: untuned, within": (
        "Within the trained length every seed shows `none` < `ntk` < `yarn` < `linear`.",
        ("extensions", f"{UNTUNED}, at 512"),
        ["none < ntk", "ntk < yarn", "yarn < linear"],
        [],
    ),
    **{
        f"long-context.md: tuned, at {length}": (
            "After 400 steps at 8 times the length every seed shows `linear` < `ntk`, `none` < `yarn`, and all of "
            "these but `yarn` < `window`; `ntk` < `none` and `yarn` < `window` are not shown. Within 512 tokens the "
            "order is the same.",
            ("extensions", f"{TUNED}, at {length}"),
            ["linear < ntk", "linear < none", "ntk < yarn", "none < yarn"]
            + [f"{name} < window" for name in ("linear", "ntk", "none")],
            ["ntk < none", "yarn < window"],
        )
        for length in (4096, 512)
    },
    "long-context.md: small": (
        "shows untuned `window` < `yarn` < `ntk`, `linear` and `none` too, and no order among those three.",
        ("extensions-small", "untuned, one factor for 256, at 256"),
        ["window < yarn", "yarn < ntk", "yarn < linear", "yarn < none"],
        ["ntk < linear", "ntk < none", "linear < none"],
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_those_of_the_results(name):
    said, (file, part), shown, hidden = ORDERS[name]
    assert said in prose(f"docs/{name.partition(':')[0]}")
    stated = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["results"][part]["orders"]
    assert set(shown) <= set(stated)
    for pair in hidden:
        first, _, second = pair.split()
        assert any(order.startswith((f"{pair}:", f"{second} < {first}:")) for order in stated)
