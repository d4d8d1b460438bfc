"""A report as one HTML page that needs nothing else: no network, no script, any screen, light or dark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Report = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6570; --paper: #fff; --panel: #f4f6f8; --line: #d9dfe5;
  --good: #1a7f4b; --bad: #b3261e; --wait: #9a6700; --bar: #3b6fb6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --dim: #9aa4ae; --paper: #14171a; --panel: #1d2226;
  --line: #333b42; --good: #4cc38a; --bad: #ff8a80; --wait: #e3b341; --bar: #6ea0e6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .4rem 0; } .dim { color: var(--dim); }
.status { font-weight: 600; } .published { color: var(--good); } .failed { color: var(--bad); }
.stopped { color: var(--wait); }
.reason { border-left: 4px solid currentColor; background: var(--panel); padding: .6rem .9rem; overflow-wrap: anywhere; }
.reason span { color: var(--ink); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .6rem; margin-top: 1.25rem; }
.tiles div { background: var(--panel); border-radius: 6px; padding: .6rem .8rem; }
.tiles dt { color: var(--dim); font-size: .85rem; } .tiles dd { margin: 0; font-size: 1.3rem; font-weight: 600; }
dl { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 500; }
td { overflow-wrap: anywhere; } td:first-child { min-width: 6.5rem; } .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.bar { width: 45%; padding-right: 0; vertical-align: middle; }
td.bar i { display: block; height: .7rem; min-width: 1px; border-radius: 2px; background: var(--bar); }
code { font: .88em ui-monospace, monospace; overflow-wrap: anywhere; }
details { margin-top: .75rem; } summary { cursor: pointer; }
"""

STEPS = {
    "read": "Read and decode",
    "tokenize": "Tokenize",
    "batch": "Batch by length",
    "compile": "Compile",
    "inference": "Infer",
    "assemble": "Assemble",
    "write": "Write",
}


def render(report: Report) -> str:
    """The page for the contents of a report.json. All of it is data: nothing in it is taken for markup."""
    title = f"lengthwise, {report['date']}: {report['status']}"
    sections = [
        _head(report),
        _tiles(report),
        _documents(report),
        _failures(report["failures"]),
        _timings(report),
        _device(report),
        _runs(report["runs"]),
        _files(report),
        _settings(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def _head(report: Report) -> str:
    status = escape(report["status"])
    lines = [
        f'<h1>Run of {escape(report["date"])}: <span class="status {status}">{status}</span></h1>',
        f'<p class="dim">{escape(report["run_id"])} · {moment(report["started"])} to {moment(report["finished"])}</p>',
    ]
    if report["reason"]:
        lines.append(f'<p class="reason {status}"><span>{escape(report["reason"])}</span></p>')
    if report["status"] == "published":
        lines.append(f"<p>Partition: <code>{escape(report['partition'])}</code></p>")
    built = report["incremental"]
    if built["base"] is not None:
        rows = "carried over" if built["carried_over"] else "left there"
        lines.append(
            f"<p>Builds on {escape(built['base'])}: rows of {number(built['objects_unchanged'])} unchanged objects "
            f"{rows}, {number(built['objects_deleted'])} objects deleted since.</p>"
        )
    return "\n".join(lines)


def _tiles(report: Report) -> str:
    efficiency = report["padding_efficiency"]
    tiles = {
        "Documents written": number(report["documents"]["written"]),
        "Failed": number(report["documents"]["failed"]),
        "Time": duration(report["seconds"]["total"]),
        "Documents a second": number(report["documents_per_second"], 1),
        "First result after": duration(report["seconds"]["first_result"]),
        "Tokens that are not padding": "–" if efficiency is None else f"{efficiency:.1%}",
        "Peak host memory": size(report["peak_host_bytes"]),
        "Device": str(report["device"]),
    }
    inner = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in tiles.items()
    )
    return f'<dl class="tiles">{inner}</dl>'


def _documents(report: Report) -> str:
    columns = ("listed", "read", "finished", "written", "failed", "skipped", "not_started")
    rows = [
        [label, *(number(counts[name]) if name in counts else "" for name in columns)]
        for label, counts in (("documents", report["documents"]), ("work units", report["units"]))
    ]
    heads = ("", *(name.replace("_", " ") for name in columns))
    return "<h2>Documents</h2>" + table(heads, rows, numbers=set(range(1, len(heads))))


def _failures(failures: Sequence[Report]) -> str:
    if not failures:
        return "<h2>Failures</h2><p>None.</p>"
    parts = ["<h2>Failures</h2>"]
    for kind in failures:
        parts.append(f"<h3>{escape(kind['reason'])}: {number(kind['count'])}</h3>")
        examples = kind["examples"]
        rows = [[e["uri"], e["record"] or "", e["step"], e["message"]] for e in examples]
        parts.append(table(("document", "record", "step", "message"), rows))
        if kind["count"] > len(examples):
            more = number(kind["count"] - len(examples))
            parts.append(f'<p class="dim">and {more} more, listed in failures/</p>')
    return "".join(parts)


def _timings(report: Report) -> str:
    seconds = report["seconds"]
    steps = [name for name in STEPS if name in seconds]
    steps += sorted(seconds.keys() - STEPS.keys() - {"total", "first_result"})
    longest = max([*(seconds[name] for name in steps), 1e-9])
    rows = "".join(
        f'<tr><td>{escape(STEPS.get(name, name))}</td><td class="number">{duration(seconds[name])}</td>'
        f'<td class="bar"><i style="width:{100 * seconds[name] / longest:.1f}%"></i></td></tr>'
        for name in steps
    )
    return (
        "<h2>Where the time went</h2>"
        f'<div class="scroll"><table>{rows}</table></div>'
        '<p class="dim">Busy seconds, added over all workers; steps overlap.</p>'
    )


def _device(report: Report) -> str:
    tokens = report["tokens"]
    rows = [
        ["Model", report["model"]["name"]],
        ["Fingerprint", report["model"]["fingerprint"]],
        ["Device", f"{report['device']}, {report['dtype']}"],
        ["Attention", report["attention"] or "–"],
        [
            "Windows",
            f"{number(report['windows'])}, of which {number(report['windows_inferred'])} computed",
        ],
        ["Tokens", f"{number(tokens['real'])}, padded to {number(tokens['padded'])}"],
        ["Compiled programs", number(report["compiled_programs"])],
        [
            "Device batches",
            ", ".join(f"{shape}: {number(count)}" for shape, count in report["shapes"].items())
            or "–",
        ],
    ]
    reasons = report["attention_reasons"]
    if isinstance(reasons, Mapping):
        rows += [[f"Attention {name}", str(reason)] for name, reason in reasons.items()]
    elif reasons:
        rows.append(
            ["Attention, why", reasons if isinstance(reasons, str) else json.dumps(reasons)]
        )
    return "<h2>Model and device</h2>" + table((), rows)


def _runs(runs: Sequence[Report]) -> str:
    if len(runs) < 2:
        return ""
    rows = [
        [
            run["run_id"],
            number(run["documents"]),
            number(run["windows_inferred"]),
            number(run["windows_kept"]),
        ]
        for run in runs
    ]
    heads = ("run", "documents kept", "windows computed", "windows kept")
    return "<h2>Resumed from</h2>" + table(heads, rows, numbers={1, 2, 3})


def _files(report: Report) -> str:
    rows = [
        [entry["path"], number(entry["rows"]), size(entry["size_bytes"])]
        for kind in ("documents", "failures")
        for entry in report["files"][kind]
    ]
    return "<h2>Files</h2>" + table(("file", "rows", "size"), rows, numbers={1, 2}) if rows else ""


def _settings(report: Report) -> str:
    rows = [
        [
            section,
            name.replace("_", "-"),
            "–" if value is None else json.dumps(value, ensure_ascii=False),
        ]
        for section, settings in report["settings"].items()
        for name, value in settings.items()
    ]
    versions = [[name, version] for name, version in report["versions"].items()]
    return (
        "<h2>Settings and versions</h2>"
        f"<details><summary>Settings</summary>{table(('', 'setting', 'value'), rows)}</details>"
        f"<details><summary>Versions</summary>{table((), versions)}</details>"
    )


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: frozenset[int] | set[int] = frozenset(),
) -> str:
    """An HTML table of text; columns whose index is in `numbers` are set to the right."""

    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    lines = [("th", heads)] if heads else []
    lines += [("td", row) for row in rows]
    body = "".join(
        f"<tr>{''.join(cell(tag, column, text) for column, text in enumerate(line))}</tr>"
        for tag, line in lines
    )
    return f'<div class="scroll"><table>{body}</table></div>'


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def moment(text: str) -> str:
    """An ISO moment in UTC as people read it."""
    return escape(text.replace("T", " ").replace("+00:00", " UTC"))


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(number_of_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number_of_bytes < 1024 or unit == "TiB":
            break
        number_of_bytes /= 1024
    return f"{number_of_bytes:.0f} {unit}" if unit == "B" else f"{number_of_bytes:.1f} {unit}"
