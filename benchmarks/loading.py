"""Loading a sharded checkpoint: time and peak anonymous memory, beside transformers on the same folder.

The folder is a Llama-shaped model of random weights, written by transformers. Every load is a process of its own
that imports first and uses as much memory once as the files are large, so that a virtual machine has it. Runs
alternate, and the least of them stands beside their median. Both libraries leave tensors in the mapped file where
they can, to be read when they are first used: so the time until the first token's logits stands beside that of the
call. Anonymous memory is what the process itself holds, without the mapped files; in runs of their own a thread
watches it. Before anything is timed, both must give the same logits. The limit beside the times is that of copying
as many bytes once.

    python benchmarks/loading.py [--dim 1024] [--layers 12] [--runs 5] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, mmap, sys, threading, time
import torch
library, folder, dtype, check, touch = sys.argv[1:]
dtype = None if dtype == "file" else getattr(torch, dtype)
if library == "phasor":
    import phasor
    from phasor.checkpoints import load
    read = lambda: load(folder, dtype=dtype)
else:
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from transformers import LlamaForCausalLM
    read = lambda: LlamaForCausalLM.from_pretrained(folder, dtype=dtype or "auto").eval()

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

with mmap.mmap(-1, int(touch), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE):
    pass  # a virtual machine gets its memory when it is first used: that is not timed
before = anonymous()
watcher = threading.Thread(target=watch)
if check == "watch":  # in a run of its own: whoever watches also takes time
    watcher.start()
begun = time.perf_counter()
model = read()
took = time.perf_counter() - begun
done.set()
if check == "watch":
    watcher.join()
held = max(peak, anonymous()) - before
with torch.inference_mode():
    model(torch.tensor([[1]]))
ready = time.perf_counter() - begun
size = sum({p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}.values())
found = {"seconds": took, "ready": ready, "peak": held, "model": size}
if check == "check":
    with torch.no_grad():
        out = model(torch.arange(64).view(2, 32))
    found["logits"] = (out if library == "phasor" else out.logits).float()[:, -1, :50].tolist()
if check == "copy":
    source = [p.detach().clone() for p in model.parameters()]
    begun = time.perf_counter()
    for p in source:
        torch.empty_like(p).copy_(p)
    found["copy"] = time.perf_counter() - begun
print(json.dumps(found))
"""


def run(library: str, folder: Path, dtype: str, check: str = "") -> dict:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    arguments = [sys.executable, "-c", CHILD, library, str(folder), dtype, check, str(size)]
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def compare(folder: Path, dtype: str, runs: int) -> dict[str, dict[str, float]]:
    checked = [run(library, folder, dtype, "check")["logits"] for library in ("phasor", "transformers")]
    difference = max(
        abs(a - b) for mine, theirs in zip(*checked, strict=True) for a, b in zip(mine, theirs, strict=True)
    )
    if difference > (1e-4 if dtype == "float32" else 0.05):
        raise SystemExit(f"the two give other logits, by {difference:.2g}: nothing is timed")
    times: dict[str, list[dict]] = {"phasor": [], "transformers": []}
    for _ in range(runs):
        for library, found in times.items():
            found.append(run(library, folder, dtype))
    result = {}
    for library, found in times.items():
        watched = [run(library, folder, dtype, "watch") for _ in range(2)]
        size = watched[0]["model"]
        result[library] = {"model": size, "peak / model": max(one["peak"] for one in watched) / size}
        for what, name in (("call", "seconds"), ("first logits", "ready")):
            result[library] |= {
                f"{what}, median": statistics.median(one[name] for one in found),
                f"{what}, least": min(one[name] for one in found),
            }
    result["copy once"] = {"seconds": run("phasor", folder, dtype, "copy")["copy"]}
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--dim", type=int, default=1024)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = options.parse_args()
    import transformers

    transformers.logging.disable_progress_bar()
    shape = {"hidden_size": given.dim, "intermediate_size": 11 * given.dim // 4, "num_hidden_layers": given.layers}
    config = transformers.LlamaConfig(
        **shape, num_attention_heads=given.dim // 64, num_key_value_heads=given.dim // 128, vocab_size=32000
    )
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")
        shards = len(list(Path(folder).glob("*.safetensors")))
        for dtype in ("float32", "bfloat16"):
            found = result[f"into {dtype}"] = compare(Path(folder), dtype, given.runs)
            print(f"float32 file in {shards} shards, into {dtype}, {found['phasor']['model'] / 2**20:.0f} MiB:")
            for library in ("phasor", "transformers"):
                one = found[library]
                print(f"  {library}: peak {one['peak / model']:.3f} of the model")
            print(f"  copying once: {found['copy once']['seconds']:.2f} s")
            for what in ("call, median", "call, least", "first logits, median", "first logits, least"):
                mine, theirs = found["phasor"][what], found["transformers"][what]
                print(f"  {what}: {mine:.2f} s against {theirs:.2f} s, {theirs / mine:.2f} times as fast")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "loading.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
