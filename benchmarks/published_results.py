"""Published results to set beside a comparison: their figures where there are some, and the orders they claim."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from phasor.evaluation.compare.schemes import ComparedScheme
from phasor.evaluation.variants import SINKS, WINDOW


class Claim(NamedTuple):
    """That one name is better than another at some multiple of the trained length."""

    better: str
    worse: str
    times: int


@dataclass(frozen=True)
class Published:
    """A published result. `table` has a row of figures per name, one for each of `columns`, at `times` the length.

    `labels` are the names of ours, and `schemes` what has to be compared for them; with `tasks` the claims are about
    the share of exact answers over all of these, and otherwise about the loss on text.
    """

    source: str
    setting: str
    labels: dict[str, str]
    schemes: tuple[ComparedScheme, ...]
    times: tuple[int, ...]
    columns: tuple[str, ...] = ()
    table: dict[str, tuple[float, ...]] | None = None
    stated: tuple[Claim, ...] = ()
    tasks: tuple[str, ...] = ()

    def claims(self) -> list[Claim]:
        """What is claimed: the orders of all figures in a column, lower first, and those that are stated in words."""
        found = list(self.stated)
        for column, times in enumerate(self.times if self.table is not None else ()):
            assert self.table is not None
            ordered = sorted(self.table, key=lambda name: self.table[name][column])  # type: ignore[index]
            found += [Claim(better, worse, times) for better, worse in combinations(ordered, 2)]
        return found


def plain(*kinds: str) -> tuple[ComparedScheme, ...]:
    return tuple(ComparedScheme(kind, kind) for kind in kinds)


def better_than(better: str, worse: tuple[str, ...], *times: int) -> tuple[Claim, ...]:
    return tuple(Claim(better, each, multiple) for multiple in times for each in worse)


PUBLISHED = {
    "yarn": Published(
        source="YaRN (Peng et al. 2023, arXiv:2309.00071)",
        setting="Llama 7B trained at 2k, extended 16 times and tuned; perplexity",
        labels={"PI": "tuned linear", "NTK": "tuned ntk", "by parts": "tuned by parts", "YaRN": "tuned yarn"},
        schemes=(
            ComparedScheme("rotary", "rotary"),
            ComparedScheme("tuned linear", "rotary", method="linear"),
            ComparedScheme("tuned ntk", "rotary", method="ntk"),
            ComparedScheme("tuned by parts", "rotary", method="yarn", fields=(("attention", 1.0),)),
            ComparedScheme("tuned yarn", "rotary", method="yarn"),
        ),
        times=(1, 4, 8, 16),
        columns=("2k", "8k", "16k", "32k"),
        table={
            "PI": (5.70, 4.64, 3.97, 3.57),
            "NTK": (4.39, 3.73, 3.21, 8.49),
            "by parts": (4.14, 3.62, 3.13, 2.81),
            "YaRN": (4.19, 3.60, 3.09, 2.77),
        },
    ),
    "alibi": Published(
        source="ALiBi (Press et al. 2021, arXiv:2108.12409), figure 1",
        setting="trained at 512 tokens of WikiText-103; perplexity beyond that length, as orders",
        labels={"sinusoidal": "sinusoidal", "rotary": "rotary", "T5 bias": "t5", "ALiBi": "alibi"},
        schemes=plain("sinusoidal", "rotary", "t5", "alibi"),
        times=(2, 4, 8, 16),
        stated=(
            *better_than("ALiBi", ("sinusoidal", "rotary", "T5 bias"), 4, 8, 16),
            *better_than("T5 bias", ("rotary", "sinusoidal"), 2, 4),
            *better_than("rotary", ("sinusoidal",), 2, 4),
        ),
    ),
    "nope": Published(
        source="The impact of positional encoding on length generalization (Kazemnejad et al. 2023, arXiv:2305.19466)",
        setting="107 million parameters, trained on tasks of up to 20 items, tested to 40; exact answers, as orders",
        labels={"NoPE": "none", "T5 bias": "t5", "ALiBi": "alibi", "rotary": "rotary", "APE": "sinusoidal"},
        schemes=plain("none", "t5", "alibi", "rotary", "sinusoidal"),
        times=(2,),
        stated=(
            *better_than("NoPE", ("ALiBi", "rotary", "APE"), 2),
            *better_than("T5 bias", ("ALiBi", "rotary", "APE"), 2),
        ),
        tasks=("copy", "reverse", "addition", "sort"),
    ),
    "streaming": Published(
        source="StreamingLLM (Xiao et al. 2023, arXiv:2309.17453)",
        setting="Llama-2-13B; perplexity far beyond the window",
        labels={"window alone": f"rotary ({WINDOW})", "four sinks": f"rotary ({SINKS})"},
        schemes=plain("rotary"),
        times=(16,),
        columns=("perplexity",),
        table={"window alone": (5158.0,), "four sinks": (5.40,)},
    ),
}
