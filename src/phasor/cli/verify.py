"""`phasor verify`: whether what phasor wrote is still as it was written."""

from __future__ import annotations

import argparse
import os

from phasor.cli.options import ON_HUB, declare_options
from phasor.cli.output import print_json
from phasor.cli.streams import print_text


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare a run folder, a model folder, prepared data or a checkpoint with the manifests that phasor wrote: the "
        "size, CRC-32 and SHA-256 of every file. The exit code is 0 if everything is as it was written, 1 if not."
    )
    parser.add_argument("folder", metavar="FOLDER", help=f"a folder that phasor wrote, or {ON_HUB}")
    accept = "take the files of a model folder as they are now, after changing them"
    declare_options(parser, {"--accept": accept, "--json": "print JSON"})


def run(given: argparse.Namespace) -> int:
    from phasor.artifacts import accept, verify

    folder = given.folder
    if not (os.path.isabs(folder) or os.path.lexists(folder)):
        from phasor.checkpoints.hub import resolve_folder  # loads torch, which a folder here does not need

        folder = resolve_folder(folder)
    if given.accept:
        accept(folder)
    reports = verify(folder)
    damaged = any(report.wrong for report in reports)
    if given.json:
        print_json({"damaged": damaged, "artifacts": reports})
        return int(damaged)
    for report in reports:
        for name, what in report.wrong:
            print_text(f"{report.folder / name} {what}")
        if not report.wrong:
            print_text(f"{report.folder}: {report.kind}, {report.files} files as they were written")
    return int(damaged)
