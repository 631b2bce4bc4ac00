"""Recipes in the package, by name. Nothing here imports torch.

A recipe's first line is a comment that says in one sentence what it trains.
"""

from __future__ import annotations

from pathlib import Path

from phasor.config.schema import unknown

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of the recipes.

    >>> names()
    ['chat', 'dates', 'language-model', 'recall', 'translation', 'translation-modern']
    """
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def summary(name: str) -> str:
    """What a recipe trains, in one sentence.

    >>> summary("dates")[:32]
    'Written English dates and number'
    """
    return read(name).partition("\n")[0].removeprefix("# ")


def read(name: str) -> str:
    """The text of a recipe, as YAML with comments.

    >>> "format: dates" in read("dates")
    True
    """
    if name not in names():
        raise unknown("recipe", name, names())
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def find(recipe: str) -> Path:
    """The file of a recipe that is given by its name, or as a file; a file of the same name comes first.

    >>> find("dates").name, find("mine.yaml").name
    ('dates.yaml', 'mine.yaml')
    """
    file = Path(recipe)
    if file.is_file() or file.name != recipe or file.suffix:
        return file
    read(recipe)
    return FOLDER / f"{recipe}.yaml"
