"""A Hugging Face hub on this machine, which answers the real client."""

import contextlib
import functools
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import huggingface_hub.constants
import pytest

REVISION = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Repositories are the folders `root/owner/name`; `asked` lists what was asked for."""

    def __init__(self, root, asked, *arguments):
        self.root, self.asked = root, asked
        super().__init__(*arguments)

    def do_HEAD(self):  # noqa: N802
        path = unquote(self.path.partition("?")[0])
        self.asked.append(path)
        if path.startswith("/api/models/"):
            owner, name, what, *_ = path.removeprefix("/api/models/").split("/")
            self.answer_of_api(self.root / owner / name, what == "tree")
        elif "/resolve/" in path:
            name, _, file = path.removeprefix("/").partition("/resolve/")
            self.answer(self.root / name / file.partition("/")[2])
        else:
            self.send(b"")

    do_GET = do_HEAD  # noqa: N815

    def answer_of_api(self, folder, tree):
        if not folder.is_dir():
            self.send_error(404)
            return
        files = [path for path in folder.iterdir() if path.is_file()]
        sizes = {path.name: path.stat().st_size for path in files}
        answer = [{"type": "file", "path": n, "size": s, "oid": "1"} for n, s in sizes.items()]
        if not tree:
            siblings = [{"rfilename": name} for name in sizes]
            answer = {"id": folder.name, "sha": REVISION, "siblings": siblings}
        self.send(json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def answer(self, path):
        if path.is_file():
            self.send(path.read_bytes(), {"ETag": f'"{path.name}"', "X-Repo-Commit": REVISION})
        else:
            self.send_error(404)

    def send(self, content, headers=None):
        self.send_response(200)
        for name, value in {**(headers or {}), "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def hub_of(root: Path):
    """Serve the repositories in a folder; yields the paths that were asked for."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, root, asked))
    Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        constants = huggingface_hub.constants
        here = f"http://127.0.0.1:{server.server_port}"
        of_file = here + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", here)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", of_file)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(root / "cache"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield asked
    server.shutdown()
    server.server_close()
