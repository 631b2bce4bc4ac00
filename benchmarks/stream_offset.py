"""The loss of 4,096 tokens of a text at position 0 and far beyond, by phasor and by transformers, in two dtypes.

    python benchmarks/stream_offset.py MODEL TEXT [--offset 1000000000] [--window 512] [--out FILE]

MODEL is a folder; `--window` gives its layers a sliding window. Results: results/stream-offset.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import phasor
from phasor.bench.peers import transformers_model
from phasor.checkpoints.swap_positions import swap_config
from phasor.evaluation.stream import evaluate_stream
from phasor.evaluation.token_source import open_tokens
from phasor.models.windows import window_config


@torch.inference_mode()
def offset_losses(given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model = phasor.load(given.model, device, dtype)
        model = swap_config(model, window_config(model.config, given.window, None))
        tokens = torch.from_numpy(open_tokens(given.text, model, special=True).read(0, 4096)).to(device)[None]
        theirs = transformers_model(model)
        for offset in (0, given.offset):
            found = evaluate_stream(model, given.text, chunk=1024, offset=offset, limit=4096)["loss"]
            positions = torch.arange(tokens.shape[1] - 1, device=device)[None] + offset
            logits = theirs(input_ids=tokens[:, :-1], position_ids=positions).logits[0].double()
            other = float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))
            rows.append({"dtype": str(dtype)[6:], "offset": offset, "phasor": found, "transformers": other})
            print(f"{str(dtype)[6:]:9} offset {offset:13,}: phasor {found:.7f}, transformers {other:.7f}", flush=True)
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", type=Path)
    options.add_argument("text", type=Path)
    options.add_argument("--offset", type=int, default=10**9)
    options.add_argument("--window", type=int)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    losses = offset_losses(given, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if given.out is not None:
        given.out.write_text(json.dumps({"torch": torch.__version__, "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main()
