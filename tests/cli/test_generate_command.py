"""`rlkernel generate`: files are complete or absent, finished completions are kept, a mistake prints one line."""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlkernel import engine
from rlkernel.cli.main import main
from rlkernel.data.characters import character_tokenizer, save_tokenizer
from rlkernel.kernels import build
from rlkernel.models import Decoder, ModelConfig, save_model
from rlkernel.training.session import TRAINERS

CONTROL = "\x1b\x07\r\x9b"
CONFIG = ModelConfig(
    "qwen3", vocab_size=16, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip
ROWS = [{"prompt": f"{i}", "id": i} for i in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("generate")
    save_tokenizer(character_tokenizer("0123456789" + CONTROL), folder / "tokenizer")
    return str(save_model(Decoder.from_config(CONFIG, seed=0), folder / "model", tokenizer_dir=folder / "tokenizer"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The test's own folder; a partly written file that is left in it fails the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    yield tmp_path
    assert not list(tmp_path.glob(".rlkernel*"))


def generate(model: str, *words: str) -> int:
    return main(["generate", "--model", model, "--device", "cpu", "--max-tokens", "6", *words])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("rlkernel: ") and error.count("\n") == 1, error
    return error


def read(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_the_other_columns_reach_the_output(model: str) -> None:
    own = {"prompt": "12", "id": {"a": [1]}, "completion": "gold", "logprobs": None, "input_completion": "é", "t": 5}
    Path("p.jsonl").write_text(json.dumps(own) + "\n")
    assert generate(model, "--prompt", "12", "--prompts", "p.jsonl", "-n", "2", "--output", "o.jsonl") == 0
    plain, _, first, second = read("o.jsonl")
    kept = {"id": {"a": [1]}, "input_input_completion": "gold", "input_logprobs": None, "input_completion": "é", "t": 5}
    for record in (first, second):
        assert {name: record[name] for name in kept} == kept and record.keys() == plain.keys() | kept.keys()
        assert record["prompt"] == "12" and record["prompt_token_ids"] == [3, 4]
        assert len(record["token_ids"]) == len(record["logprobs"]) == 6


@pytest.mark.parametrize("made", ("same", "other words", "symbolic link", "hard link"))
def test_the_prompts_file_is_never_the_output(model: str, capsys: pytest.CaptureFixture[str], made: str) -> None:
    names = {"same": "p.jsonl", "other words": os.path.abspath("p.jsonl")}
    output, before = names.get(made, "o.jsonl"), Path("p.jsonl").read_bytes()
    if made == "symbolic link":
        os.symlink("p.jsonl", output)
    if made == "hard link":
        os.link("p.jsonl", output)
    assert generate("absent", "--prompts", "p.jsonl", "--output", output) == 2
    assert "is the prompts file p.jsonl itself; give another name" in one_line(capsys)
    assert Path("p.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "words", (["--model", "absent"], ["--prompts", "absent"], ["--prompt", "x" * 99], ["--top-p", "3"])
)
def test_a_run_that_fails_leaves_the_output_as_it_was(
    model: str, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    Path("o.jsonl").write_text("old")
    assert generate(model, "--prompts", "p.jsonl", "--output", "o.jsonl", *words) == 2
    assert one_line(capsys) and Path("o.jsonl").read_text() == "old"
    assert generate(model, "--prompts", "p.jsonl", "--output", "n.jsonl", *words) == 2
    assert not Path("n.jsonl").exists()


def test_an_output_is_replaced_whole(model: str) -> None:
    """A link stays a link, a file keeps its permissions, and a pipe is written to."""
    Path("real.jsonl").write_text("old\n" * 1000)
    os.chmod("real.jsonl", 0o640)
    os.symlink("real.jsonl", "o.jsonl")
    assert generate(model, "--prompts", "p.jsonl", "--output", "o.jsonl") == 0
    assert os.path.islink("o.jsonl") and os.stat("real.jsonl").st_mode & 0o777 == 0o640
    assert [row["id"] for row in read("real.jsonl")] == [0, 1, 2]
    reading, writing = os.pipe()
    assert generate(model, "--prompts", "p.jsonl", "--output", f"/dev/fd/{writing}") == 0
    os.close(writing)
    with open(reading, encoding="utf-8") as lines:
        assert lines.read() == Path("real.jsonl").read_text()


def test_a_full_disk_is_one_line(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("o.jsonl").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        assert generate(model, "--prompts", "p.jsonl", "--output", "o.jsonl") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write o.jsonl: File too large; free some space" in one_line(capsys)
    assert Path("o.jsonl").read_text() == "old"
    assert generate(model, "--prompts", "p.jsonl", "--output", "/dev/full") == 2
    assert "cannot write /dev/full: No space left on device; free some space" in one_line(capsys)
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    assert generate(model, "--prompt", "12") == 2
    assert "No space left on device; free some space" in one_line(capsys)


@pytest.mark.parametrize("finished", (0, 2))
@pytest.mark.parametrize("output", ([], ["--output", "o.jsonl"]), ids=("printed", "file"))
def test_ctrl_c_keeps_what_is_finished(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, finished: int, output: list[str]
) -> None:
    class Interrupted(engine.LLM):
        """One prompt after another, until Ctrl-C."""

        def __init__(self, *words: Any, **more: Any) -> None:
            super().__init__(*words, **more, max_num_seqs=1)
            self.ended = 0

        def step(self) -> list[engine.RequestOutput]:
            if self.ended == finished:
                raise KeyboardInterrupt
            ended = super().step()
            self.ended += len(ended)
            return ended

    Path("o.jsonl").write_text("old")
    assert generate(model, "--prompts", "p.jsonl", "--output", "whole.jsonl") == 0
    monkeypatch.setattr(engine, "LLM", Interrupted)
    assert generate(model, "--prompts", "p.jsonl", *output) == 130
    captured = capsys.readouterr()
    assert captured.err.startswith(f"rlkernel: interrupted: generate: {finished} of 3 prompts were finished; ")
    assert captured.err.count("\n") == 1
    if output and finished:
        assert read("o.jsonl") == read("whole.jsonl")[:finished]
    else:
        assert Path("o.jsonl").read_text() == "old"
        assert captured.out.count("> ") == finished


def test_a_terminal_gets_no_control_characters(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--prompt", "1\x1b2", "-n", "8", "--seed", "1"]
    assert generate(model, *words, "--output", "o.jsonl") == 0
    texts = [row["completion"] for row in read("o.jsonl")]
    assert set(CONTROL) <= set("".join(texts))
    assert generate(model, *words) == 0
    assert capsys.readouterr().out == "> 1\x1b2\n" + "".join(f"{text}\n" for text in texts)  # as in a pipe
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
    monkeypatch.setenv("TERM", "dumb")
    assert generate(model, *words) == 0
    shown = capsys.readouterr().out
    assert not set(CONTROL) & set(shown) and shown.startswith("> 1\\x1b2\n")
    assert all(escape in shown for escape in ("\\x1b", "\\x07", "\\r", "\\x9b"))


def test_characters_outside_the_encoding_are_escaped(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert generate(model, "--prompt", "é") == 0
    assert out.getvalue().startswith(b"> \\xe9\n")


def test_text_that_is_not_unicode_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "--prompt", "12", "--prompt", "1\udcff") == 2
    assert "--prompt 2: the text is not Unicode: '\\udcff' at position 1" in one_line(capsys)


def test_a_name_of_the_hub(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A name is found in the hub's local cache; else the error says that a directory is meant, and how to get one."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert generate("owner/Some-1.5B", "--prompt", "12") == 2
    assert "directory (to get one: rlkernel fetch owner/Some-1.5B)" in one_line(capsys)
    folder = tmp_path / "hub" / "models--owner--Some-1.5B"
    (folder / "refs").mkdir(parents=True)
    (folder / "snapshots").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    os.symlink(model, folder / "snapshots" / "abc123")
    assert generate("owner/Some-1.5B", "--prompt", "12", "--output", "cached.jsonl") == 0
    assert generate(model, "--prompt", "12", "--output", "local.jsonl") == 0
    assert read("cached.jsonl") == read("local.jsonl")
    assert engine.LLM("owner/Some-1.5B").tokenizer is not None
    for path, message in (("nowhere", "nowhere does not exist; expected"), ("p.jsonl", "p.jsonl is not a directory")):
        assert generate(path, "--prompt", "12") == 2
        assert message in one_line(capsys)


def test_a_folder_that_may_not_be_entered_is_one_line(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: str, *more: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("rlkernel.data.tokenizer.local_directory", closed)
    assert generate(model, "--prompt", "12") == 2
    assert f"{model}: Permission denied; change its permissions" in one_line(capsys)


def test_without_a_compiler_it_says_so_first(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(build, "cpu_library", lambda: pytest.fail("there is nothing to compile with"))

    def stop(*words: object) -> None:
        raise FloatingPointError("stopped before the first step")

    monkeypatch.setattr(engine.LLM, "step", stop)
    with pytest.raises(FloatingPointError):
        generate(model, "--prompt", "12")
    assert "about a thousand times slower" in one_line(capsys)
    monkeypatch.setitem(TRAINERS, "grpo", stop)
    words = ["train", "grpo", "warmup.examples=4", "eval.rows=2", "--device", "cpu"]
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith(
        "rlkernel: there is no C++ compiler, so the readable reference ops run"
    )
    assert "instead of minutes" in lines[0] and "install g++ or clang++" in lines[0]
    assert main([*words, "--backend", "torch"]) == 2  # the torch backend runs no op of rlkernel
    assert "compiler" not in capsys.readouterr().err
