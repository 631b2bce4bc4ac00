"""Written English dates and numbers with their Chinese, made by code.

>>> chinese_date(datetime.date(2031, 3, 5)), chinese_number(10050)
('二〇三一年三月五日', '一万零五十')
"""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Iterator
from typing import Literal

Split = Literal["train", "valid"]
DIGITS = "〇一二三四五六七八九"
FIRST, LAST = datetime.date(1800, 1, 1), datetime.date(2199, 12, 31)
COUNTS = {"train": 40_000, "valid": 1_000}
HELD_OUT = 0.1  # of all dates and of the numbers from 100 on, whatever way they are written
MONTHS = "January February March April May June July August September October November December".split()  # noqa: SIM905
SMALL = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
SMALL += "thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: SIM905
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905


def dates(split: Split, seed: int = 0, count: int | None = None) -> Iterator[tuple[str, str]]:
    """Pairs of English and Chinese; a date or number of one split is never in the other, however it is written.

    >>> list(dates("valid", count=2)) == list(dates("valid", count=2))
    True
    """
    draw = random.Random(f"{split} {seed}")
    made = 0
    while made < (COUNTS[split] if count is None else count):
        if draw.random() < 0.7:
            day = FIRST + datetime.timedelta(days=draw.randrange((LAST - FIRST).days + 1))
            pair, key = (english_date(day, draw), chinese_date(day)), day.isoformat()
        else:
            number = int(10 ** draw.uniform(0, 5)) - 1
            pair, key = (english_number(number, draw), chinese_number(number)), str(number)
        if (len(key) > 2 and held_out(key)) == (split == "valid"):
            yield pair
            made += 1


def held_out(key: str) -> bool:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") < HELD_OUT * 2**64


def english_date(day: datetime.date, draw: random.Random) -> str:
    """One of the ways to write a date."""
    month = MONTHS[day.month - 1]
    return draw.choice(
        (
            f"{month} {day.day}, {day.year}",
            f"{day.day} {month} {day.year}",
            f"the {ordinal(day.day)} of {month}, {day.year}",
            f"{month[:3]} {day.day}, {day.year}",
            f"{month} {ordinal(day.day)}, {day.year}",
        )
    )


def ordinal(number: int) -> str:
    """
    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 22)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd']
    """
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def chinese_date(day: datetime.date) -> str:
    year = "".join(DIGITS[int(digit)] for digit in str(day.year))
    return f"{year}年{chinese_number(day.month)}月{chinese_number(day.day)}日"


def english_number(number: int, draw: random.Random) -> str:
    """A number in words or in figures."""
    return draw.choice((in_words(number), in_words(number), f"{number:,}"))


def in_words(number: int) -> str:
    """
    >>> in_words(12_045)
    'twelve thousand and forty-five'
    """
    if number < 20:
        return SMALL[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{SMALL[number % 10]}" if number % 10 else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = number % size
    joint = " and " if 0 < rest < 100 else " "
    return f"{in_words(number // size)} {name}" + (joint + in_words(rest) if rest else "")


def chinese_number(number: int) -> str:
    """
    >>> [chinese_number(n) for n in (0, 10, 12, 110, 2005, 30_000)]
    ['零', '十', '十二', '一百一十', '二千零五', '三万']
    """
    if number == 0:
        return "零"
    written, gap = "", False
    for size, name in ((10_000, "万"), (1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // size % 10
        if digit:
            written += ("零" if gap and written else "") + DIGITS[digit] + name
        gap = digit == 0
    return written[1:] if written.startswith("一十") else written
