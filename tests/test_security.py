"""Nothing that is read runs, leads elsewhere, or is taken for anything but data; secrets are not told."""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path

import pytest

from lengthwise_command import documents, failures, job, manifest, run, run_here
from pipeline.config import OutputSettings, SettingsError
from pipeline.partitions import OBJECTS_SCHEMA, read_manifest, read_objects, write_table
from pipeline.running import _say
from pipeline.state import Layout

CHECKOUT = Path(__file__).parents[1]
DATE = "2026-01-02"
SOURCES = [
    path
    for package in ("pipeline", "model", "kernels")
    for path in (CHECKOUT / package).rglob("*.py")
]
MODULES_THAT_RUN_DATA = {
    "pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "torch",
    "yaml",
}
CALLS_THAT_RUN_DATA = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
ARGUMENTS_THAT_RUN_DATA = {"allow_pickle", "trust_remote_code", "shell"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_no_module_can_run_what_it_reads(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            found += [name for name in names if name.split(".")[0] in MODULES_THAT_RUN_DATA]
        elif isinstance(node, ast.Call):
            found += [name for name in [ast.unparse(node.func)] if name in CALLS_THAT_RUN_DATA]
            found += [each.arg for each in node.keywords if each.arg in ARGUMENTS_THAT_RUN_DATA]
    assert found == []


def test_code_that_comes_with_a_checkpoint_does_not_run(tiny_checkpoint, tmp_path):
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_evil.Evil"}
    (model / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    for name in ("modeling_evil.py", "__init__.py", "sitecustomize.py"):
        (model / name).write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a document")
    assert run_here(job(tmp_path / "in", tmp_path / "out", model, date=DATE)) == 0
    assert not ran.exists()


@pytest.mark.parametrize(
    "date", ["../../2026-01-02", "2026-01-02/../..", "2026-01-02\n", "/2026-01-02", ".", ""]
)
def test_a_date_is_a_day_and_no_path(date):
    with pytest.raises(SettingsError, match="--date"):
        OutputSettings(output="out", date=date)


def test_ids_and_names_are_no_paths(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    ids = ["../../../escaped", "/escaped", "..", "a/../../b", "~/escaped", "C:\\escaped"]
    lines = [json.dumps({"id": name, "text": f"text {n}"}) for n, name in enumerate(ids)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    a_job = job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE, id_field="id")
    assert run_here(a_job) == 0
    assert sorted(documents(tmp_path / "out", DATE)["record"].to_pylist()) == sorted(ids)
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    kinds = {path.relative_to(tmp_path).parts[:2] for path in new}
    assert kinds == {("out", kind) for kind in ("documents", "failures", "state", "runs")}


@pytest.fixture
def published(tiny_checkpoint, tmp_path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a document")
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE)) == 0
    return tmp_path / "out"


@pytest.mark.parametrize("kind", ["documents", "failures", "state"])
@pytest.mark.parametrize("prefix", ["../", "/", "documents/../../", "state/date=2026-01-01/"])
def test_a_manifest_that_leads_out_of_its_partition_is_none_of_ours(kind, prefix, published):
    layout = Layout(str(published), DATE)
    found = manifest(published, DATE)
    entry = found["state"] if kind == "state" else found[kind][0]
    entry["path"] = prefix + entry["path"].rpartition("/")[2]
    Path(layout.manifest).write_text(json.dumps(found))
    assert read_manifest(layout) is None


def test_a_state_that_names_a_date_outside_is_not_read(published):
    layout = Layout(str(published), DATE)
    rows = read_objects(layout).to_pylist()
    rows[0]["partition"] = "2026-01-01/../../../elsewhere"
    path = published / manifest(published, DATE)["state"]["path"]
    write_table(str(path), OBJECTS_SCHEMA.empty_table().from_pylist(rows, schema=OBJECTS_SCHEMA))
    assert read_objects(layout) is None


HOSTILE = [
    "--output=elsewhere", "-h", "%s%n%(x)d", "{0.__class__}{run_id}", "$(touch ran)", "`touch ran`",
    "; touch ran", "[bold red]", "a\nlengthwise: all is well", "\x1b]0;title\x07", "{{7*7}}",
    "<script>alert(1)</script>", "'; DROP TABLE documents; --", "\u202egnp.exe",
]  # fmt: skip


def test_documents_are_data_whatever_their_names_ids_and_texts_look_like(
    tiny_checkpoint, tmp_path, monkeypatch
):
    folder = tmp_path / "in"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for number, text in enumerate(HOSTILE):
        name = text.replace("/", "_")
        Path(f"{name}.txt").write_text(text)
        Path(f"{name}.jsonl").write_text(json.dumps({"id": text, "text": text}) + '\n{"id": 1}\n')
        Path(f"{number}.jsonl").write_text(json.dumps({"id": "x", "text": text, "kept": text}))
    said = run(
        "--input", ".", "--output", tmp_path / "out", "--model", tiny_checkpoint, "--date", DATE,
        "--id-field=id", "--keep-fields=kept", "--max-failure-ratio=0.5",
    )  # fmt: skip
    table = documents(tmp_path / "out", DATE)
    assert table.num_rows == 3 * len(HOSTILE)
    names = {os.path.relpath(uri, folder) for uri in table["uri"].to_pylist()}
    assert names == set(os.listdir(folder))
    assert set(HOSTILE) <= set(table["record"].to_pylist())
    assert set(HOSTILE) <= set(table["kept"].to_pylist())
    assert failures(tmp_path / "out", DATE).num_rows == len(HOSTILE)
    assert not list(tmp_path.rglob("ran")) and "\x1b" not in said
    [page] = (tmp_path / "out" / "runs").rglob("report.html")
    assert "<script>alert" not in page.read_text()


def test_what_a_document_says_cannot_steer_a_terminal(capsys):
    _say("record '\x1b[2J' of \u202e\x07.txt failed\n\tin ünïcödé 文書")
    said = capsys.readouterr().err
    assert said == "record '\\x1b[2J' of \\u202e\\x07.txt failed\n\tin ünïcödé 文書\n"


def test_credentials_are_told_nowhere(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a document")
    (tmp_path / "in" / "b.jsonl").write_text("broken\n")
    secret = "a-secret-that-nobody-may-see"
    flags = [f"--s3_{name}={secret}" for name in ("secret_access_key", "session_token")]
    arguments = [
        "--input",
        tmp_path / "in",
        "--output",
        tmp_path / "out",
        "--model",
        tiny_checkpoint,
    ]
    for expect, more in ((1, []), (0, ["--max-failure-ratio=1"])):
        said = run(*arguments, "--date", DATE, *flags, *more, expect=expect)
        assert secret not in said
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
