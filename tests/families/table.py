"""Write the table of families into the docs, from the notes the tests leave: python tests/families/table.py NOTES."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from phasor.models.families import family, names

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- families: written by `make families` -->", "<!-- end of families -->"


def rows(notes: Path) -> list[str]:
    """A line for every family, with the worst difference among its random models."""
    found: dict[str, list[dict]] = {}
    for file in sorted(notes.glob("*.json")):
        note = json.loads(file.read_text())
        found.setdefault(note["family"].partition("/")[0], []).append(note)
    lines = ["| family | `model_type` | classes | random models | worst difference |", "|---|---|---|---:|---:|"]
    for name in names():
        notes_of = found[name]
        classes = ", ".join(f"`{c}`" for c in sorted({note["class"] for note in notes_of}))
        worst = max(note["worst"] for note in notes_of)
        lines.append(f"| {family(name).title} | `{name}` | {classes} | {len(notes_of)} | {worst:.1e} |")
    return lines


def main() -> None:
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    table = "\n".join(rows(Path(sys.argv[1])))
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
