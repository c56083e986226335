"""`rlkernel fetch` against a stand-in of the hub: what is downloaded, what is refused, what a missing network says."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkernel.cli.main import main
from rlkernel.data.tokenizer import local_directory

COMMIT = "a" * 40
MODEL = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "additional_chat_templates/tools.jinja", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
]  # fmt: skip
OTHER = ["pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.safetensors",
         "modeling_custom.py", "README.md", "training_args.bin"]  # fmt: skip
DATA = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test.jsonl"]
REPOS = {
    "models/owner/model": MODEL + OTHER,
    "models/owner/pickled": ["config.json", "tokenizer.json", "pytorch_model.bin"],
    "models/owner/slow": ["config.json", "model.safetensors", "tokenizer.model"],
    "datasets/owner/set": [*DATA, "README.md", "set.py"],
    "datasets/owner/csv": ["a.csv"],
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Lists the files of `REPOS` and serves each file's name as its content."""

    def do_GET(self) -> None:
        listing = re.match(r"/api/((?:models|datasets)/owner/\w+)/(tree|revision)/", self.path)
        if listing and listing[1] in REPOS:
            names = REPOS[listing[1]]
            sizes = [{"type": "file", "path": name, "size": len(name), "oid": _etag(name)} for name in names]
            info = {"id": listing[1].partition("/")[2], "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            self._send(json.dumps(sizes if listing[2] == "tree" else info).encode(), "listing")
        elif (file := re.match(rf"/(?:datasets/)?owner/\w+/resolve/{COMMIT}/(.+)", self.path)) is not None:
            self._send(file[1].encode(), file[1])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _send(self, body: bytes, name: str) -> None:
        self.send_response(200)
        headers = {"Content-Length": len(body), "ETag": f'"{_etag(name)}"', "X-Repo-Commit": COMMIT}
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


def _etag(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A running stand-in; yields the client's cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cache = tmp_path / "cache"
    for name, value in {
        "ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"http://127.0.0.1:{server.server_port}"
        "/{repo_id}/resolve/{revision}/{filename}",
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield cache
    server.shutdown()
    server.server_close()


def files_in(folder: Path) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.startswith(".cache/"))


def test_a_model_without_pickles_and_code(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "owner/model"]) == 0
    out = capsys.readouterr().out
    snapshot = local_directory("owner/model")
    assert snapshot == hub / "models--owner--model" / "snapshots" / COMMIT and files_in(snapshot) == sorted(MODEL)
    assert f"owner/model: {len(MODEL)} files in {snapshot}\n" in out
    assert out.endswith('next: rlkernel generate --model owner/model --prompt "..."\n')
    assert main(["fetch", "owner/model", "--output", str(tmp_path / "here")]) == 0
    assert files_in(tmp_path / "here") == sorted(MODEL)
    assert f"--model {tmp_path / 'here'} --prompt" in capsys.readouterr().out


def test_a_data_set(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "owner/set", "--data", "--output", str(tmp_path / "set")]) == 0
    assert files_in(tmp_path / "set") == sorted(DATA)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        f"  {tmp_path}/set/data/test.jsonl",
        f"  {tmp_path}/set/data/train-*.parquet",
        f"next: rlkernel data check '{tmp_path}/set/data/test.jsonl'",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["owner/pickled"], "owner/pickled has no model*.safetensors, and rlkernel does not load pickled weights"),
        (["owner/slow"], "owner/slow has no tokenizer.json; choose one with a fast tokenizer"),
        (["owner/csv", "--data"], "the data set owner/csv has no Parquet or JSONL files"),
        (["owner/absent"], "owner/absent cannot be downloaded: "),
        (["a/b/c"], "give the name of a repository on the hub, owner/name"),
    ],
)
def test_what_is_refused(hub: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["fetch", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlkernel: fetch: ") and message in error and error.count("\n") == 1
    assert not hub.exists() or not list(hub.rglob("*.safetensors"))


def test_without_a_network(hub: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["fetch", "owner/model"]) == 2
    assert "fetch: the hub cannot be reached (" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["fetch", "owner/model"]) == 2
    assert "HF_HUB_OFFLINE is set; unset it" in capsys.readouterr().err


def test_no_other_module_uses_the_client() -> None:
    package = Path(__file__).parents[2] / "rlkernel"
    clients = re.compile(r"^\s*(?:import|from) (?:huggingface_hub|httpx|requests|urllib\.request)\b", re.MULTILINE)
    users = [path.relative_to(package).as_posix() for path in package.rglob("*.py") if clients.search(path.read_text())]
    assert users == ["cli/fetch.py"]
