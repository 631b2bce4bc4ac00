"""Translations against references: BLEU and chrF by sacrebleu, and how many are the same to the letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from phasor.distribution import missing_package

IDEOGRAPH = re.compile(r"[〇一-鿿㐀-䶿豈-﫿\U00020000-\U0003ffff]")
KANA = re.compile(r"[\u3041-\u30ff]")


def scores(translations: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """BLEU and chrF in percent with their signatures, and the share of exact matches.

    >>> scores(["the cat sat on the mat"], ["the cat sat on the mat"])["bleu"]
    100.0...
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise missing_package("BLEU and chrF need the package sacrebleu", "train") from None
    bleu, chrf = BLEU(tokenize="zh" if mostly_chinese(references) else "13a"), CHRF()
    same = sum(a.strip() == b.strip() for a, b in zip(translations, references, strict=True))
    return {
        "bleu": bleu.corpus_score(translations, [references]).score,
        "chrf": chrf.corpus_score(translations, [references]).score,
        "exact_match": same / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def mostly_chinese(texts: Sequence[str]) -> bool:
    """Whether more than half of the texts have Chinese characters, and no kana, with which they would be Japanese.

    >>> mostly_chinese(["二〇三一年", "打开 KDE"]), mostly_chinese(["東京に行く", "año"])
    (True, False)
    """
    chinese = sum(bool(IDEOGRAPH.search(text)) and not KANA.search(text) for text in texts)
    return 2 * chinese > len(texts)
