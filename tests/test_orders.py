"""Orders in sentences of the pages, as `a` < `b`, are those that the results say are shown."""

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from test_pages import ROOT, prose, rows, section

from phasor.evaluation.lengths_report import order_groups

RESULTS = ROOT / "benchmarks" / "results"


@cache
def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


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
    stated = results(file)["results"][part]["orders"]
    assert set(shown) <= set(stated)
    for pair in hidden:
        first, _, second = pair.split()
        assert any(order.startswith((f"{pair}:", f"{second} < {first}:")) for order in stated)


def shown_pairs(statements: list[str]) -> dict[tuple[str, str], bool]:
    """Whether an order is shown, by its two names, the lower loss first."""
    return {
        tuple(statement.partition(":")[0].split(" < ")): not statement.endswith("not shown") for statement in statements
    }


def groups(name: str, length: int) -> tuple[list[list[str]], list[tuple[str, str]]]:
    pairs = shown_pairs(results(name)["orders"][str(length)])
    orders = [
        {"length": length, "first": first, "second": second, "shown": shown} for (first, second), shown in pairs.items()
    ]
    return order_groups({"orders": orders}, length)


def test_orders_of_the_default_comparison():
    said = (
        "Shown at 1,024 tokens: `alibi` and the window < `t5`, `none` and `rotary` < `sinusoidal`; `alibi` < the "
        "window is not shown, and neither is an order among `t5`, `none` and `rotary`. No untuned extension of "
        "rotary reads as well as its window; of them `yarn` and `dynamic-yarn` are best at 1,024."
    )
    assert said in prose("docs/compare.md")
    tiers, within = groups("compare", 1024)
    assert [set(tier) for tier in tiers] == [{"alibi", "rotary (window)"}, {"t5", "none", "rotary"}, {"sinusoidal"}]
    assert within == []
    extensions = shown_pairs(results("compare")["orders_of_extensions"]["1024"])
    assert all(extensions["window", name] for _, name in extensions if name not in ("window", "sinks"))
    best = [
        name for name in dict.fromkeys(name for pair in extensions for name in pair) if name not in ("window", "sinks")
    ]
    assert best[:2] == ["yarn", "dynamic-yarn"]
    assert all(extensions[first, other] for first in best[:2] for other in best[2:])


def test_orders_beside_published_ones():
    said = (
        "ALiBi is better than the others at 4, 8 and 16 times the trained length, and rotary better than sinusoidal, "
        "as published. T5 biases are worse than rotary at 2, 4 and 8 times, the opposite of what is published; at 16 "
        "times they are not apart."
    )
    assert said in prose("docs/compare.md")
    shown = {length: shown_pairs(found) for length, found in results("compare")["orders"].items()}
    trained = results("compare")["trained_length"]
    for times in (4, 8, 16):
        pairs = shown[str(times * trained)]
        assert all(pairs["alibi", other] for other in ("rotary", "t5", "sinusoidal"))
        assert pairs["rotary", "sinusoidal"]
    assert all(shown[str(times * trained)]["rotary", "t5"] for times in (2, 4, 8))
    assert not shown[str(16 * trained)]["t5", "rotary"]


def test_orders_of_all_schemes():
    said = (
        "Shown at 1,024 tokens: `forget` and `sandwich` < `kerple`, `combined`, `alibi` and `transformerxl` < the "
        "window < `pope` < all but the last three < `sinusoidal` < `learned` < `counting`."
    )
    assert said in prose("docs/compare.md")
    tiers, _ = groups("compare-all", 1024)
    named = [["forget", "sandwich"], ["kerple", "combined", "alibi", "transformerxl"], ["rotary (window)"], ["pope"]]
    last = [["sinusoidal"], ["learned"], ["counting"]]
    assert [sorted(tier) for tier in tiers[:4] + tiers[5:]] == [sorted(tier) for tier in named + last]
    table = [cells for cells in rows(section("docs/compare.md", "All schemes")) if len(cells) == 5]
    assert len(table) == sum(map(len, tiers))
    losses = [float(cells[3]) for cells in table]
    assert all(low <= high for low, high in pairwise(losses))


def test_orders_of_later_schemes_and_of_subspaces():
    page = prose("docs/compare.md")
    assert "Shown at 1,024 tokens: the window < all of them, and no order among these." in page
    far = shown_pairs(results("learned-rotary")["orders"]["1024"])
    assert {pair for pair, shown in far.items() if shown} == {
        ("rotary (window)", name) for name in ("grape", "rotary", "profiles")
    }
    assert (
        "Shown at 64 tokens: `rotary` < `4 of 16 pairs` and `8 of 16 pairs` < `2 of 16 pairs` and `1 of 16 pairs`; "
        "shown at 1,024 tokens: the window < all of them, and no other order."
    ) in page
    far, near = (shown_pairs(results("subspaces-texts")["orders"][length]) for length in ("1024", "64"))
    some, few = ["4 of 16 pairs", "8 of 16 pairs"], ["2 of 16 pairs", "1 of 16 pairs"]
    assert all(near["rotary", other] for other in some + few)
    assert all(near[first, second] for first in some for second in few)
    assert {pair for pair, shown in far.items() if shown} == {
        ("rotary (window)", name) for name in ["rotary", *some, *few]
    }


def test_orders_of_bases_and_decays():
    """In the paragraphs on questions about rotary, and in the guide."""
    page = prose("docs/compare.md")
    assert (
        "Shown at 1,024 tokens: the window < all of them, and `base 100` and `base 1000` < `rotary` < `base 1000000`; "
        "shown at 64 tokens: `base 1000` < all others."
    ) in page
    far, near = (shown_pairs(results("base")["orders"][length]) for length in ("1024", "64"))
    bases = ["base 100", "base 1000", "rotary", "base 100000", "base 1000000"]
    chain = [("base 100", "rotary"), ("base 1000", "rotary"), ("rotary", "base 1000000")]
    assert all(far[pair] for pair in [*(("rotary (window)", base) for base in bases), *chain])
    assert all(near["base 1000", other] for other in [*bases, "rotary (window)"] if other != "base 1000")
    assert (
        "at 1,024 tokens `combined` (rotary and ALiBi) and `alibi` < `xpos` < `rotary`, and `combined` < `alibi` is "
        "not shown."
    ) in page
    decays = shown_pairs(results("compare-all")["orders"]["1024"])
    assert all(decays[pair] for pair in [("combined", "xpos"), ("alibi", "xpos"), ("xpos", "rotary")])
    assert not decays["combined", "alibi"]
    assert (
        "Shown at 64 tokens: `rotary+alibi` < `alibi` < `xpos` < `rotary` < `long wavelengths`; shown at 1,024 tokens: "
        "`rotary+alibi` and `alibi` < the window < `xpos` < `rotary` and `long wavelengths`."
    ) in page
    far, near = (shown_pairs(results("decay-texts")["orders"][length]) for length in ("1024", "64"))
    assert all(near[pair] for pair in pairwise(["rotary+alibi", "alibi", "xpos", "rotary", "long wavelengths"]))
    tiers = [["rotary+alibi", "alibi"], ["rotary (window)"], ["xpos"], ["rotary", "long wavelengths"]]
    assert all(far[better, worse] for low, high in pairwise(tiers) for better in low for worse in high)
    assert not any(far[tuple(tier)] for tier in tiers if len(tier) == 2)
    spread = [
        max(losses) - min(losses)
        for length in (64, 128, 256, 512, 1024)
        for losses in [
            [
                r["loss"]["estimate"]
                for r in results("base")["rows"]
                if r["length"] == length and r["extension"] in bases
            ]
        ]
    ]
    assert f"by at most {max(spread):.2f} nats here" in page


def test_orders_of_decays_in_copying():
    said = (
        "Shown at 6 letters: `rotary`, `xpos` and `rotary+alibi` < `alibi` < `long wavelengths`, in wrong answers. So"
    )
    assert said in prose("docs/compare.md")
    shown = {order["statement"] for order in results("decay")["orders"] if order["size"] == 6 and order["shown"]}
    rotating = [
        f"{name} < {other}" for name in ("rotary", "xpos", "rotary+alibi") for other in ("alibi", "long wavelengths")
    ]
    assert shown == {*rotating, "alibi < long wavelengths"}
    assert not any(row["exact answers, %"]["estimate"] for row in results("decay")["rows"] if row["size"] > 6)
