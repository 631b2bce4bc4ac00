"""`phasor lab`: a local page on which positions become visible."""

from __future__ import annotations

import argparse
import os
import sys
import threading

from phasor.cli.options import ON_HUB
from phasor.distribution import __version__, missing_package
from phasor.serving.listen import address_of, is_loopback, listen


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Open a local page on which positions become visible. It needs no network; every number on it is computed "
        "by this installation. Ctrl-C ends it."
    )
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        help=f"a model folder or a run that the page may read, or {ON_HUB}",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8765, help="the port; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open no browser")


def run(given: argparse.Namespace) -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise missing_package("the lab needs the packages starlette and uvicorn", "lab") from None
    from phasor.checkpoints.hub import resolve_folder
    from phasor.lab.guard import LOCAL
    from phasor.lab.server import build_app

    exposed = not is_loopback(given.host)
    folders = [folder if os.path.lexists(folder) else resolve_folder(folder) for folder in given.folders]
    app = build_app(folders, hosts=(*LOCAL, given.host), numeric_hosts=exposed, version=__version__)
    with listen(given.host, given.port) as server_socket:
        port = server_socket.getsockname()[1]
        url = address_of(given.host, port)
        print(f"phasor lab: {url} (Ctrl-C ends it)", flush=True)
        if exposed:
            print(describe_exposure(given.host, port, given.folders), file=sys.stderr, flush=True)
        if not given.no_browser:
            open_browser(url)
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none")
        uvicorn.Server(config).run(sockets=[server_socket])


def describe_exposure(host: str, port: int, folders: list[str]) -> str:
    """What others can do where the lab listens on a network."""
    read = f" and see what the page shows of {', '.join(folders)}" if folders else ""
    return f"phasor: everyone who reaches {host} at port {port} can open this page without a password, compute{read}"


def open_browser(url: str) -> None:
    """Open the page where there is a screen; a browser of the terminal would take the terminal."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
