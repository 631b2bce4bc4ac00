"""Commands that run models, by several processes in one start, and what each process holds of folders.

    python inference_world.py SIZE FOLDER

`FOLDER/commands.json` lists the arguments of commands by name; what each process printed goes to `NAME-RANK.txt` there.
`FOLDER/folders.json` lists model folders whose weights are compared, bit by bit, with those of a whole model.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from world_processes import fork_processes

from phasor import load
from phasor.cli import main
from phasor.config.recipe import MeshConfig
from phasor.parallel.load import load_shards
from phasor.parallel.processes import join_processes
from phasor.torchrun import read_launch


def run_all(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = read_launch().rank
    for name, arguments in json.loads((folder / "commands.json").read_text()).items():
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert main(arguments) == 0, arguments
        (folder / f"{name}-{rank}.txt").write_text(printed.getvalue())
    with join_processes(MeshConfig(), "cpu") as processes:
        for place in json.loads((folder / "folders.json").read_text()):
            parts = dict(load_shards(place, processes).named_parameters())
            whole = dict(load(place, verify=False).named_parameters())
            assert parts.keys() == whole.keys()
            for name, weight in whole.items():
                chunks = weight.detach().chunk(processes.size)
                part = parts[name].to_local()
                assert part.numel() < weight.numel() or len(weight) == 1, name
                assert part.dtype == weight.dtype
                expected = chunks[rank] if rank < len(chunks) else weight[:0]
                assert torch.equal(part, expected.reshape(part.shape)), name


if __name__ == "__main__":
    sys.exit(fork_processes(int(sys.argv[1]), lambda: run_all(Path(sys.argv[2]))))
