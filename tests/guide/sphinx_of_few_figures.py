"""Sphinx as the site is built with, but for figures: the first is painted, and others are empty.

Painting takes a third of the time, and `tests/test_docs.py` runs the code of every figure.

    python sphinx_of_few_figures.py ARGUMENTS
"""

import io
import itertools
import sys

from matplotlib.figure import Figure
from sphinx.cmd.build import main

paint, numbers = Figure.savefig, itertools.count()


def paint_the_first(figure: Figure, file: io.BytesIO, **options: object) -> None:
    if next(numbers) == 0:
        paint(figure, file, **options)
    else:
        width, height = figure.get_size_inches() * 72
        size = f'width="{width}pt" height="{height}pt" viewBox="0 0 {width} {height}"'
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" {size}/>'.encode())


if __name__ == "__main__":
    Figure.savefig = paint_the_first
    sys.exit(main())
