"""`phasor serve`: a model behind HTTP."""

from __future__ import annotations

import argparse
import os
import sys

from phasor.cli.generate import read_model
from phasor.cli.options import (
    ON_HUB,
    STORED,
    add_adapters,
    add_checkpoint,
    add_extension_fields,
    add_part,
    add_positions,
    add_weights,
    chosen_adapters,
    declare_options,
)
from phasor.distribution import missing_package
from phasor.serving.listen import is_loopback

KEY = "PHASOR_API_KEY"

SERVER_OPTIONS = {
    "--name NAME": "what clients call the model (default: the name of its folder)",
    "--template FILE": "a chat template, in place of the folder's",
    "--deterministic": "a request gets the same bits alone and among others, which takes longer",
    "--dtype DTYPE": "load another dtype: float32, bfloat16, float16, float64",
}
SIZES = {
    "max-length": ("the most tokens of a prompt and its answer (default: the model's)", None),
    "max-rows": ("answers that are computed at once (default: 16, on a GPU 256)", None),
    "max-waiting": ("requests that may wait; further ones are refused with 429 (default: %(default)s)", 1024),
    "max-connections": ("connections that may be open (default: 4096, or what the system allows)", None),
    "pages": ("pages of keys and values (default: what memory there is)", None),
    "page-size": ("tokens of a page (default: %(default)s)", 16),
    "prefill-chunk": ("tokens of a prompt that are read at a time (default: 512, on a GPU 8192)", None),
    "shutdown-timeout": ("seconds that answers under way have at a first signal (default: %(default)s)", 120),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer many clients at once over the interface of OpenAI's: /v1/completions, /v1/chat/completions, "
        f"/v1/embeddings. A key that they have to send is read from the variable {KEY}. A first SIGTERM or Ctrl-C "
        "finishes what is under way, a second one ends at once."
    )
    parser.add_argument("folder", help=f"a model folder, a run, or {ON_HUB}")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="the port; 0 takes a free one (default: %(default)s)")
    declare_options(parser, SERVER_OPTIONS)
    for name, (text, default) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    add_checkpoint(parser)
    add_adapters(parser)
    add_part(parser)
    parser.add_argument("--device", default="cpu", help="where to run: cpu, cuda, ... (default: %(default)s)")
    add_positions(parser)
    add_weights(parser, "quantize the large weights to 8 or 4 bits, or keep those of a quantized folder", "nf4", STORED)
    add_extension_fields(parser)


def run(given: argparse.Namespace) -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        need = "serving needs the packages starlette, uvicorn and prometheus-client"
        raise missing_package(need, "serve") from None
    from phasor.checkpoints.chat_template import ChatTemplate
    from phasor.serving.server import serve

    key = os.environ.get(KEY)
    if key is not None and not key.strip():
        raise ValueError(f"{KEY} is empty: set it to a key, or unset it to serve without one")
    key = key and key.strip()
    adapter = chosen_adapters(given.adapter)
    model = read_model(given.folder, given, None, given.checkpoint, given.part, adapter=adapter, swaps=True)
    template = None
    if given.template is not None:
        template = ChatTemplate.read(model.origin.folder if model.origin else ".", given.template)
    if not is_loopback(given.host) and key is None:
        print(
            f"phasor: everyone who reaches {given.host} at port {given.port} can use this model; set {KEY} to ask "
            "for a key",
            file=sys.stderr,
            flush=True,
        )
    serve(
        model,
        name=given.name,
        host=given.host,
        port=given.port,
        api_key=key,
        template=template,
        deterministic=given.deterministic,
        on_ready=lambda url: print(f"phasor serve: {url} (Ctrl-C ends it)", flush=True),
        **{name.replace("-", "_"): getattr(given, name.replace("-", "_")) for name in SIZES},
    )
