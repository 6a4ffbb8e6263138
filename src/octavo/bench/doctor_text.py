"""The doctor's report for people: tables of at most 100 columns."""

from __future__ import annotations

import math
import textwrap

from octavo.backends.cpu.kernel_path import CheckRow
from octavo.bench.decode import DecodeShare
from octavo.bench.doctor import DoctorReport, LevelReport
from octavo.bench.kernels import KernelSpeed
from octavo.bench.limits import Limits
from octavo.bench.tables import table

_WIDTH = 100
_SHAPE_OF_ROWS = {1: "1 row", 4: "2-4 rows", 16: "5-16 rows", 64: "17-64 rows", 512: "512 rows"}


def report_text(report: DoctorReport) -> str:
    parts = [_machine(report), _used(report), _limits(report.limits)]
    parts += [_level(level) for level in report.levels]
    parts.append(_decode(report.decode))
    parts += [textwrap.fill(f"WARNING: {warning}", _WIDTH, break_long_words=False) for warning in report.warnings]
    checked = sum(len(level.checks) for level in report.levels)
    verdict = "all right" if report.all_right else "NOT all right"
    parts.append(f"{checked} classes of kernel cases checked: {verdict}. {report.seconds:.0f} s.")
    return "\n\n".join(parts)


def _machine(report: DoctorReport) -> str:
    m = report.machine
    caches = m["caches"]
    assert isinstance(caches, dict)
    rows = [
        ("CPU", str(m["cpu"])),
        ("CPUs", f"{m['cpus']}, of which this process may use {m['cpus_usable']}"),
        ("Caches", ", ".join(f"{name} {_size(size)}" for name, size in caches.items()) or "unknown"),
        ("Memory", f"{_size(m['memory_bytes'])}, {_size(m['memory_available_bytes'])} of it available"),
        ("Huge pages", str(m["huge_pages"])),
    ]
    return _list(rows)


def _used(report: DoctorReport) -> str:
    u = report.used
    entries = u["entries"]
    assert isinstance(entries, dict)
    other = [f"{entry} of {level}" for entry, level in entries.items() if level != u["level"]]
    levels = u["levels"]
    assert isinstance(levels, list)
    kernels = f"{u['level']} for all of {', '.join(entries)}" if not other else f"{u['level']}, but {', '.join(other)}"
    rows = [
        ("Kernels", kernels),
        ("Levels here", ", ".join(levels)),
        ("KV cache", f"{u['kv_dtype']} by default"),
        ("Threads", f"{u['threads']}, {u['pinned_threads']} of them pinned to a CPU"),
        ("Verdicts", str(u["verdict_file"])),
    ]
    return _list(rows)


def _list(rows: list[tuple[str, str]]) -> str:
    """Names and texts, the texts aligned and wrapped."""
    indent = 13
    wrapped = (textwrap.fill(text, _WIDTH - indent, break_long_words=False) for _, text in rows)
    return "\n".join(name.ljust(indent) + text.replace("\n", "\n" + " " * indent) for (name, _), text in zip(rows, wrapped, strict=True))


def _limits(limits: Limits) -> str:
    rows = [("LIMIT", "THREADS", "HOW", "COUNTED", "SECONDS", "RATE", "")]
    best = {id(limits.best_read(r.where, r.threads)) for r in limits.reads}
    best |= {id(limits.best_peak(p.kind, p.threads)) for p in limits.peaks}
    for r in limits.reads:
        streams = "1 stream" if r.streams == 1 else f"{r.streams} streams"
        ahead = f"prefetch {r.prefetch_bytes}" if r.prefetch_bytes else "no prefetch"
        how = f"{streams}, {ahead}, {'huge' if r.huge_pages else 'small'} pages"
        shown = (f"{r.bytes / 1e6:.2f} MB", _seconds(r.seconds), f"{r.rate / 1e9:.1f} GB/s")
        rows.append((f"read {r.where}", str(r.threads), how, *shown, _mark(id(r) in best)))
    for p in limits.peaks:
        shown = (f"{p.operations / 1e6:.1f} MOP", _seconds(p.seconds), f"{p.rate / 1e12:.3f} TOP/s")
        rows.append((p.kind, str(p.threads), p.instruction, *shown, _mark(id(p) in best)))
    head = f"Limits (reads in {limits.load_bits}-bit loads; a multiply-add is two operations; * is the best of its kind):"
    return head + "\n" + table(rows, right=".>.>>>.")


def _mark(best: bool) -> str:
    return "*" if best else ""


def _level(level: LevelReport) -> str:
    head = ("KERNEL", "FORMAT", "SHAPE", "CHECK", "ERROR", "TOLERANCE", "SPEED", "SHARE OF LIMIT")
    return f"{level.path or level.level}:\n" + table([head, *_level_rows(level)], right="....>>>.")


def _level_rows(level: LevelReport) -> list[tuple[str, ...]]:
    """Each check with the speed of its shape; below the checks of a kernel and format the speeds of shapes that have none."""
    speeds = {_place(s): s for s in level.speeds}
    blocks: dict[str, dict[str, list[tuple[str, ...]]]] = {}  # kernel -> format -> rows
    for check in level.checks:
        kernel, kind, shape, *_ = check
        row = (kernel, kind or "-", shape, *_verdict(check), *_speed(speeds.pop((kernel, kind, shape), None)))
        blocks.setdefault(kernel, {}).setdefault(kind, []).append(row)
    for place, speed in speeds.items():
        kernel, kind, _ = place
        blocks.setdefault(kernel, {}).setdefault(kind, []).append((*place, "-", "-", "-", *_speed(speed)))
    return [row for formats in blocks.values() for rows in formats.values() for row in rows]


def _place(s: KernelSpeed) -> tuple[str, str, str]:
    if s.kernel == "matmul":
        return s.kernel, s.format, _SHAPE_OF_ROWS.get(s.rows, f"{s.rows} rows")
    if s.kernel == "prefill":
        return "attention", s.format, f"{s.rows} rows"
    return "attention", s.format, f"1 row behind {s.context}"


def _verdict(check: CheckRow) -> tuple[str, str, str]:
    *_, right, error, tolerance = check
    return "right" if right else "WRONG", _number(error), _number(tolerance)


def _number(value: float) -> str:
    return "not a number" if not math.isfinite(value) else f"{value:.1e}" if value else "0"


def _speed(s: KernelSpeed | None) -> tuple[str, str]:
    if s is None:
        return "-", "-"
    bound = s.limit if s.limit is not None else "read" if s.rows == 1 else "operations"
    shown = f"{s.bytes_per_s / 1e9:.1f} GB/s" if bound == "read" else f"{s.operations_per_s / 1e12:.3f} TOP/s"
    return shown, "-" if s.share is None else f"{100 * s.share:.0f} % of {s.limit}"


def _decode(d: DecodeShare | None) -> str:
    if d is None:
        return "Decoding was not measured: the default model is not in the cache (`octavo pull smollm2`)."
    kv = f"{d.num_prompt} + {d.num_output} tokens, KV in {d.kv_dtype}"
    reads = f"{d.weight_bytes / 1e6:.1f} MB of weights and {d.kv_bytes / 1e6:.1f} MB of KV"
    rate = (d.weight_bytes + d.kv_bytes) * d.decode_tok_s
    lines = [
        f"{d.model}, one stream, {kv}:",
        f"  prefill {d.prefill_tok_s:.0f} token/s, decode {d.decode_tok_s:.1f} token/s; a token reads {reads}:",
        f"  {rate / 1e9:.1f} GB/s, {100 * d.share:.0f} % of the {d.read_rate / 1e9:.1f} GB/s that memory delivers",
    ]
    return "\n".join(lines)


def _size(num_bytes: object) -> str:
    assert isinstance(num_bytes, int)
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{num_bytes} B"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
