"""
The report as one HTML page: drawn here, without a script, a font or a picture from anywhere.

Owns how it looks.  Marks are SVG that stretches with the page, words are HTML beside them, so that a phone shows the
same letters as a wide screen.  Every name and key is escaped, and the page's own policy forbids scripts and requests.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from typing import Final

from pgreaper import __version__
from pgreaper.records import DeadLetter
from pgreaper.report import OUTCOMES, Batch, Bucket, PolicyReport, Report
from pgreaper.text import count, duration, instant, one_line, plural, visible
from pgreaper.text import key as shown_key

_MARKS: Final = {
    True: ("good", "✓", "kept"),
    False: ("bad", "✗", "not kept"),
    None: ("idle", "\N{MIDDLE DOT}", "nothing due"),
}
_WORDS: Final = {
    "expired": "expired",
    "already-done": "already done",
    "not-eligible": "not eligible any more",
    "retry": "to be tried again",
    "dead-letter": "became dead letters",
}
_LATENESS_TICKS: Final = (
    *(
        (0.001, "1 ms"),
        (0.01, "10 ms"),
        (0.1, "100 ms"),
        (1.0, "1 s"),
        (10.0, "10 s"),
        (60.0, "1 min"),
        (600.0, "10 min"),
    ),
    *((3600.0, "1 h"), (6 * 3600.0, "6 h"), (86400.0, "1 d"), (7 * 86400.0, "7 d"), (30 * 86400.0, "30 d")),
    *((365 * 86400.0, "1 y"), (10 * 365 * 86400.0, "10 y"), (100 * 366 * 86400.0, "100 y")),
)
_DAY: Final = 86400
_TIME_TICKS: Final = (
    *(1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200),
    *(_DAY, 2 * _DAY, 7 * _DAY, 14 * _DAY, 28 * _DAY, 91 * _DAY, 182 * _DAY, 365 * _DAY, 1826 * _DAY),
)
# A command longer than that is of no use on a page.
_LONGEST_COMMAND: Final = 400


def page(report: Report) -> str:
    """The whole page; its text is ASCII or UTF-8 and says so."""
    title = f"Expiry report: {_text(report.database)}"
    sections = "".join(_section(p, report, n) for n, p in enumerate(report.policies))
    more = f"<p class=note>Policies that are not shown: {count(report.more)}. Name them to see them.</p>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'\">\n"
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n'
        f"{_head(report)}{_overview(report) if len(report.policies) > 1 else ''}{sections}{more if report.more else ''}"
        f"<footer>pgreaper {_text(__version__)}. Times are UTC, by the database clock. "
        "Keys, counts and error classes only: no value of a row is on this page.</footer>\n</main>\n</body>\n</html>\n"
    )


def _text(text: str, limit: int = 60) -> str:
    return escape(visible(text, limit))


def _head(report: Report) -> str:
    kind, sign, _ = _MARKS[report.kept]
    total = {outcome: sum(p.outcomes[outcome] for p in report.policies) for outcome in OUTCOMES}
    failed = total["retry"] + total["dead-letter"]
    over = sum(p.over for p in report.policies)
    dead = sum(p.status.dead for p in report.policies)
    taken = sum(p.taken_back for p in report.policies)
    tiles = [
        ("Holds expired", count(total["expired"]), ""),
        ("Later than promised", count(over), "bad" if over else ""),
        ("Failed", count(failed), "warn" if failed else ""),
        ("Leases taken back", count(taken), "warn" if taken else ""),
        ("Dead letters now", count(dead, capped=any(p.status.dead >= 10_000 for p in report.policies)),
         "bad" if dead else ""),
    ]  # fmt: skip
    cells = "".join(f'<div class="tile {mark}"><dt>{name}</dt><dd>{value}</dd></div>' for name, value, mark in tiles)
    long = duration(report.until - report.since)
    return (
        f"<header><p class=over>Expiry report · {_text(report.database)}</p>"
        f'<h1 class="{kind}"><span class=sign aria-hidden=true>{sign}</span>{escape(report.headline)}</h1>'
        f"<p class=span>{_moment(report.since)} to {_moment(report.until)} UTC ({long})</p>"
        f"<dl class=tiles>{cells}</dl></header>\n"
    )


def _moment(at: datetime) -> str:
    return f'<time datetime="{at.isoformat()}">{at:%Y-%m-%d %H:%M}</time>'


def _overview(report: Report) -> str:
    rows = []
    for n, p in enumerate(report.policies):
        kind, sign, word = _MARKS[p.kept]
        rows.append(
            [
                f'<a href="#p{n}">{_text(p.policy, 40)}</a>',
                f'<span class="mark {kind}">{sign} {word}</span>',
                count(p.outcomes["expired"]),
                count(p.over),
                duration(p.lateness_p99),
                duration(p.lateness_max),
                duration(p.objective),
                count(p.status.due, capped=p.status.due_capped),
                count(p.status.dead),
            ]
        )
    heads = ["Policy", "Objective kept", "Expired", "Late", "p99", "Latest", "Promised", "Due now", "Dead"]
    return f"<section><h2>Policies</h2>{_table(heads, rows, right=range(2, 9))}</section>\n"


def _section(p: PolicyReport, report: Report, n: int) -> str:
    kind, sign, word = _MARKS[p.kept]
    every = duration(report.step)
    late = ""
    if p.lateness_p50 is not None:
        late = f" · p50 {duration(p.lateness_p50)}, p99 {duration(p.lateness_p99)}, latest {duration(p.lateness_max)}"
    bounds = f"<p class=note>Bounded: {escape('; '.join(p.bounds))}.</p>" if p.bounds else ""
    state = "" if p.status.state == "active" else f' <span class="mark warn">{escape(p.status.state)}</span>'
    parts = [
        f"<section id=p{n} aria-labelledby=h{n}>",
        f'<h2 id=h{n}>{_text(p.policy)} <span class="mark {kind}">{sign} {word}</span>{state}</h2>',
        f"<p class=verdict>{escape(p.verdict[:1].upper() + p.verdict[1:])}.</p>",
        f"<p class=facts>Owner {_text(p.owner)} · target {_text(p.status.target, 80)}",
        f" · promised {duration(p.objective)}{late}</p>",
    ]
    if any(b.expired for b in p.buckets):
        parts.append('<div class="charts">')
        parts.append(_expired_chart(p, every, f"e{n}"))
        parts.append(_lateness_chart(p, every, f"l{n}"))
        parts.append("</div>" + _numbers(p.buckets, every))
    if any(p.outcomes.values()) or any(age.due for age in p.backlog):
        parts.append(f'<div class="pair">{_outcomes(p)}{_backlog(p)}</div>')
    if p.failures:
        rows = [
            [
                _text(f.error_class, 50),
                escape(f.sqlstate or "-"),
                _text(f.constraint_name, 50) if f.constraint_name else "-",
                count(f.retries),
                count(f.dead_letters),
                f"{f.last_at:%m-%d %H:%M:%S}",
            ]
            for f in p.failures[:20]
        ]
        heads = ["Failed with", "SQLSTATE", "Constraint", "Retried", "Dead", "Last"]
        parts.append(f"<h3>Failures by class</h3>{_table(heads, rows, right=(3, 4))}")
    if p.dead_letters:
        parts.append(_letters(p))
    if p.slowest:
        parts.append(f"<h3>Slowest batches</h3>{_batches(p.slowest)}")
    if p.lost or p.taken_back:
        told = "<h3>Leases taken back</h3><p>Their workers died, or took longer than the lease.</p>"
        parts.append(told + (_batches(p.lost) if p.lost else ""))
    return "".join(parts) + bounds + "</section>\n"


# -- charts


def _expired_chart(p: PolicyReport, every: str, name: str) -> str:
    """Bars: holds expired per bucket, those later than the objective on top in another colour."""
    most = max(b.expired for b in p.buckets)
    top = _ceiling(most)
    marks = []
    for i, b in enumerate(p.buckets):
        if not b.expired:
            continue
        high = 100 * b.expired / top
        late = min(high, 100 * b.over / top)
        tip = f"{b.start:%m-%d %H:%M}: {b.expired:,} expired" + (f", {b.over:,} late" if b.over else "")
        late_part = (
            f'<rect class=late x="{i + 0.1:.2f}" y="{100 - high:.3f}" width=".8" height="{late:.3f}"/>' if late else ""
        )
        marks.append(
            f'<g><title>{tip}</title><rect class=bar x="{i + 0.1:.2f}" y="{100 - high:.3f}" width=".8" '
            f'height="{max(high, 0.6):.3f}"/>{late_part}</g>'
        )
    peak = max(p.buckets, key=lambda b: b.expired)
    described = f"Holds expired per {every}; the most, {most:,}, at {peak.start:%Y-%m-%d %H:%M} UTC."
    legend = '<span class="key bar">expired</span>'
    if p.over:
        legend += '<span class="key late">later than promised</span>'
    ticks = [(100.0, _short(top)), (50.0, _short(top / 2)), (0.0, "0")]
    return _plot("Holds expired", f"per {every}", described, legend, name, p.buckets, marks, ticks)


def _lateness_chart(p: PolicyReport, every: str, name: str) -> str:
    """Per bucket a bar from p50 to p99 and a whisker up to the latest, on a logarithmic scale; the goal as a line."""
    values = [_seconds(v) for b in p.buckets for v in (b.lateness_p50, b.lateness_max) if v is not None]
    goal = max(_seconds(p.objective), 0.001)
    low = max((t for t, _ in _LATENESS_TICKS if t <= min([*values, goal])), default=_LATENESS_TICKS[0][0])
    high = min((t for t, _ in _LATENESS_TICKS if t >= max([*values, goal]) and t > low), default=_LATENESS_TICKS[-1][0])

    def at(seconds: float) -> float:
        """From the top, in percent."""
        return 100 - 100 * math.log(min(max(seconds, low), high) / low) / math.log(high / low)

    marks = []
    for i, b in enumerate(p.buckets):
        if b.lateness_p50 is None or b.lateness_p99 is None or b.lateness_max is None:
            continue
        y50, y99, top = (at(_seconds(v)) for v in (b.lateness_p50, b.lateness_p99, b.lateness_max))
        tip = (
            f"{b.start:%m-%d %H:%M}: p50 {duration(b.lateness_p50)}, p99 {duration(b.lateness_p99)}, "
            f"latest {duration(b.lateness_max)}"
        )
        over = " over" if b.over else ""
        marks.append(
            f"<g><title>{tip}</title>"
            f'<line class="whisker{over}" x1="{i + 0.5}" x2="{i + 0.5}" y1="{top:.3f}" y2="{y99:.3f}"/>'
            f'<line class="max{over}" x1="{i + 0.15:.2f}" x2="{i + 0.85:.2f}" y1="{top:.3f}" y2="{top:.3f}"/>'
            f'<rect class=range x="{i + 0.15:.2f}" y="{y99:.3f}" width=".7" height="{max(y50 - y99, 0.8):.3f}"/>'
            f'<line class=p50 x1="{i + 0.15:.2f}" x2="{i + 0.85:.2f}" y1="{y50:.3f}" y2="{y50:.3f}"/></g>'
        )
    size = len(p.buckets)
    marks.append(f'<line class=goal x1="0" x2="{size}" y1="{at(goal):.3f}" y2="{at(goal):.3f}"/>')
    ticks = [(100 - at(t), text) for t, text in _LATENESS_TICKS if low <= t <= high]
    stride = math.ceil(len(ticks) / 6)
    ticks = ticks[::-1][::stride]
    described = (
        f"Lateness per {every}, logarithmic: p50 {duration(p.lateness_p50)}, p99 {duration(p.lateness_p99)}, "
        f"latest {duration(p.lateness_max)}; promised {duration(p.objective)}."
    )
    legend = (
        '<span class="key range">p50 to p99</span><span class="key max">latest</span>'
        f'<span class="key goal">promised {duration(p.objective)}</span>'
    )
    return _plot("Lateness", f"per {every}", described, legend, name, p.buckets, marks, ticks)


def _plot(
    title: str,
    unit: str,
    described: str,
    legend: str,
    name: str,
    buckets: Sequence[Bucket],
    marks: Iterable[str],
    ticks: Sequence[tuple[float, str]],
) -> str:
    """A chart: words in HTML, marks in an SVG that is stretched; a unit is a bucket wide and a percent high."""
    size = len(buckets)
    grid = "".join(f'<line class=grid x1="0" x2="{size}" y1="{100 - y:.2f}" y2="{100 - y:.2f}"/>' for y, _ in ticks)
    labels = "".join(f'<span style="bottom:{y:.2f}%">{escape(text)}</span>' for y, text in ticks)
    times = "".join(
        f'<span style="left:{100 * place:.2f}%">{escape(text)}</span>' for place, text in _time_ticks(buckets)
    )
    return (
        f"<figure><figcaption><b>{title}</b> {escape(unit)}<span class=legend>{legend}</span></figcaption>"
        f'<div class=plot><div class=y aria-hidden=true>{labels}</div><svg viewBox="0 0 {size} 100" '
        f'preserveAspectRatio="none" role="img" aria-labelledby="{name}"><title id="{name}">{escape(described)}</title>'
        f"{grid}{''.join(marks)}</svg><div class=x aria-hidden=true>{times}</div></div></figure>"
    )


def _time_ticks(buckets: Sequence[Bucket]) -> list[tuple[float, str]]:
    """Up to six round times, each with its place from 0 to 1."""
    begin = buckets[0].start.timestamp()
    step = (buckets[-1].start.timestamp() - begin) / max(len(buckets) - 1, 1) or 1.0
    long = step * len(buckets)
    every = next((t for t in _TIME_TICKS if long / t <= 5 and t >= step), _TIME_TICKS[-1])
    shape = "%H:%M:%S" if every < 60 else "%H:%M" if every < 86400 else "%m-%d" if long < 300 * 86400 else "%Y-%m"
    found = []
    moment = -(-begin // every) * every
    while moment < begin + 0.96 * long:
        found.append(((moment - begin) / long, f"{datetime.fromtimestamp(moment, UTC):{shape}}"))
        moment += every
    return found


def _numbers(buckets: Sequence[Bucket], every: str) -> str:
    """The charts as a table."""
    rows = [
        [f"{b.start:%m-%d %H:%M}", count(b.expired, capped=b.bounded), count(b.over), duration(b.lateness_p50),
         duration(b.lateness_p99), duration(b.lateness_max)]
        for b in buckets
        if b.expired
    ]  # fmt: skip
    heads = ["From", "Expired", "Late", "p50", "p99", "Latest"]
    table = _table(heads, rows, right=range(1, 6), plain=True)
    return f"<details><summary>These charts as a table, per {escape(every)}</summary>{table}</details>"


def _outcomes(p: PolicyReport) -> str:
    rows = [(_WORDS[o], p.outcomes[o], count(p.outcomes[o]), o == "dead-letter") for o in OUTCOMES]
    return f"<div><h3>Outcomes</h3>{_bars(rows)}</div>"


def _backlog(p: PolicyReport) -> str:
    if not any(age.due for age in p.backlog):
        words = "It cannot be read." if p.status.state == "broken" else "Nothing is due and waiting."
        return f"<div><h3>Due now, by age</h3><p>{words}</p></div>"
    rows = [(age.age, age.due, count(age.due, capped=age.capped), False) for age in p.backlog]
    note = "<p class=small>Leased and failed ones are not among them.</p>"
    return f"<div><h3>Due now, by age</h3>{_bars(rows)}{note}</div>"


def _bars(rows: Sequence[tuple[str, int, str, bool]]) -> str:
    most = max(number for _, number, _, _ in rows) or 1
    lines = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td class=n>{shown}</td><td class=b aria-hidden=true>"
        f"{_bar(100 * number / most, 'late' if bad else '')}</td></tr>"
        for name, number, shown, bad in rows
    )
    return f"<table class=bars>{lines}</table>"


# -- tables


def _bar(percent: float, kind: str) -> str:
    return f'<i class="{kind}" style="width:{percent:.1f}%"></i>' if percent else ""


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = (), *, plain: bool = False
) -> str:
    """Cells are HTML already.  On a narrow screen each row becomes a card, unless the table is ``plain``."""
    wanted = set(right)
    style = ["" if n not in wanted else " class=n" for n in range(len(heads))]
    top = "".join(f"<th scope=col{style[n]}>{escape(head)}</th>" for n, head in enumerate(heads))
    lines = "".join(
        "<tr>"
        + "".join(f'<td{style[n]} data-l="{escape(heads[n])}">{cell}</td>' for n, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<table class="{"plain" if plain else "cards"}"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>'


def _batches(batches: Sequence[Batch]) -> str:
    rows = [
        [f"{b.claimed_at:%m-%d %H:%M:%S}", duration(b.took), count(b.holds), escape(b.ending.replace("-", " ")),
         _text(b.worker or "-", 50)]
        for b in batches
    ]  # fmt: skip
    return _table(["Claimed", "Took", "Holds", "Ended", "Worker"], rows, right=(1, 2))


def _letters(p: PolicyReport) -> str:
    items = "".join(_letter(letter) for letter in p.dead_letters)
    return f"<h3>Dead letters</h3><ul class=letters>{items}</ul>"


def _letter(d: DeadLetter) -> str:
    why = ", ".join(part for part in (d.error_class, d.sqlstate, d.constraint_name) if part)
    command = one_line(d.replay_command)
    if len(command) > _LONGEST_COMMAND:
        command = "pgreaper dead list"
    return (
        f"<li><div><b>{escape(shown_key(d.key, 60))}</b> <span class=why>{_text(why, 90)}</span>"
        f"<div class=small>of {_text(d.owner, 40)} · <span>died {_short_time(d.died_at)}</span> after "
        f"{plural(d.attempts, 'attempt')} · <span>due {_short_time(d.deadline)}</span></div></div>"
        f"<code>{escape(command)}</code></li>"
    )


# -- numbers


def _short_time(at: datetime) -> str:
    """To the minute; what Python cannot tell, and what lies far away, as ``instant`` writes it."""
    return f"{at:%Y-%m-%d %H:%M}" if 1 < at.year < 9999 else instant(at)


def _seconds(value: timedelta) -> float:
    return max(value.total_seconds(), 0.0)


def _ceiling(number: float) -> float:
    """The next round number: 1, 2, 4, 5 or 10 of its decade; even, so that half of it is one too."""
    decade = 10.0 ** math.floor(math.log10(max(number, 2)))
    return next(decade * f for f in (1, 2, 4, 6, 8, 10) if decade * f >= number)


def _short(number: float) -> str:
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{sign}"
    return f"{number:g}"


_STYLE: Final = """
:root{--bg:#f7f7f5;--card:#fff;--ink:#1b1f24;--soft:#5c6570;--line:#e3e4e1;--blue:#3b74d8;--pale:#a9c4f0;
--bad:#c23a2b;
--good:#25794b;--warn:#9a6400;--badbg:#fbeae8;--goodbg:#e6f4ec;--warnbg:#fbf1dc}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1c2026;--ink:#e6e8ea;--soft:#9aa4af;--line:#2e343c;
--blue:#5c93f0;
--pale:#35517f;--bad:#f0796b;--good:#5cc38a;--warn:#e0b04c;--badbg:#3a211e;--goodbg:#1a3325;--warnbg:#362b16}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:28px 24px 40px}
header{margin-bottom:22px}
.over,.span,.facts,.note,.small,footer{color:var(--soft)}
.over{margin:0;font-size:13px;letter-spacing:.02em}
h1{margin:.15em 0;font-size:28px;line-height:1.25;font-weight:650;overflow-wrap:anywhere}
.sign{display:inline-block;width:1.45em;height:1.45em;line-height:1.45em;margin-right:.5em;border-radius:50%;
text-align:center;
font-size:.78em;vertical-align:.08em}
.good .sign,.mark.good{background:var(--goodbg);color:var(--good)}
.bad .sign,.mark.bad{background:var(--badbg);color:var(--bad)}
.idle .sign,.mark.idle{background:var(--line);color:var(--soft)}
.mark.warn{background:var(--warnbg);color:var(--warn)}
.span{margin:0 0 18px}
h2{margin:0 0 .2em;font-size:20px;line-height:1.35;overflow-wrap:anywhere}
h3{margin:26px 0 8px;font-size:14px}
.mark{display:inline-block;padding:1px 9px;border-radius:99px;font-size:13px;font-weight:600;white-space:nowrap;
vertical-align:.12em}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:20px 22px 22px;
margin:0 0 18px}
.verdict{margin:.1em 0 .2em;font-size:16px;overflow-wrap:anywhere}
.facts{margin:0;font-size:13px;overflow-wrap:anywhere}
.note{margin:18px 0 0;font-size:13px}
p{margin:.3em 0}
.tiles{display:grid;grid-template-columns:repeat(5,1fr);gap:12px;margin:0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:11px 14px}
.tile dt{color:var(--soft);font-size:13px}
.tile dd{margin:0;font-size:23px;font-weight:650;line-height:1.3}
.tile.bad dd{color:var(--bad)}.tile.warn dd{color:var(--warn)}
.charts,.pair{display:grid;grid-template-columns:1fr 1fr;gap:8px 34px}
figure{margin:22px 0 0;min-width:0}
figcaption{font-size:13px;color:var(--soft);display:flex;flex-wrap:wrap;gap:0 6px;align-items:baseline}
figcaption b{color:var(--ink);font-size:14px}
.legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:0 12px}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px;
vertical-align:-1px}
.key.bar::before{background:var(--blue)}.key.late::before{background:var(--bad)}
.key.range::before{background:var(--pale)}
.key.max::before{height:2px;background:var(--blue);vertical-align:4px}
.key.goal::before{height:0;border-top:2px dashed var(--warn);border-radius:0;vertical-align:4px;width:14px}
.plot{display:grid;grid-template-columns:46px 1fr;grid-template-rows:170px 20px;margin-top:14px}
.y,.x{position:relative;font-size:12px;color:var(--soft)}
.y span{position:absolute;right:8px;transform:translateY(50%);line-height:1;white-space:nowrap}
.x{grid-column:2}
.x span{position:absolute;top:4px;line-height:1;padding-left:4px;border-left:1px solid var(--line)}
svg{display:block;width:100%;height:100%;overflow:visible}
line{vector-effect:non-scaling-stroke;stroke-width:1}
.grid{stroke:var(--line)}
rect.bar{fill:var(--blue)}rect.late{fill:var(--bad)}rect.range{fill:var(--pale)}
.p50{stroke:var(--blue);stroke-width:2}.max{stroke:var(--blue);stroke-width:2}.whisker{stroke:var(--pale)}
.max.over{stroke:var(--bad)}.whisker.over{stroke:var(--bad);opacity:.55}
.goal{stroke:var(--warn);stroke-dasharray:5 4;stroke-width:1.5}
g:hover rect,g:hover line{opacity:.65}
details{margin-top:10px;font-size:13px}
summary{cursor:pointer;color:var(--soft)}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{padding:5px 10px 5px 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}
thead th{color:var(--soft);font-weight:500;border-bottom:1px solid var(--line)}
tbody tr+tr td{border-top:1px solid var(--line)}
.n{text-align:right}
td.n{white-space:nowrap}
.plain{max-width:760px}
a{color:var(--blue)}
.bars th,.bars td{border:0!important;padding-top:4px;padding-bottom:4px}
.n+td:not(.n),.n+th:not(.n){padding-left:22px}.bars .n+td:not(.n){padding-left:0}
.bars th{font-weight:400;width:1%;white-space:nowrap}
.bars .n{width:1%;padding-left:10px}
.bars .b{padding-right:0;vertical-align:middle}
.bars i{display:block;height:11px;min-width:1px;border-radius:2px;background:var(--blue)}
.bars i.late{background:var(--bad)}
.letters{list-style:none;margin:0;padding:0}
.letters li{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:4px 24px;align-items:center;
padding:9px 0;border-top:1px solid var(--line);overflow-wrap:anywhere}
.letters li:first-child{border-top:0;padding-top:0}
.why{color:var(--bad);margin-left:6px}
.small{font-size:13px}
.small span{white-space:nowrap}
code{display:block;margin:3px 0;padding:5px 9px;border-radius:6px;background:var(--bg);
border:1px solid var(--line);
font:12.5px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere;
white-space:pre-wrap}
footer{font-size:13px;margin-top:22px}
@media (max-width:700px){
main{padding:18px 14px 30px}h1{font-size:23px}section{padding:15px 15px 18px}
.tiles{grid-template-columns:1fr 1fr}.charts,.pair{grid-template-columns:minmax(0,1fr)}
.cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.cards,.cards tbody,.cards tr,.cards td{display:block}
.cards tr+tr{border-top:1px solid var(--line);padding-top:7px;margin-top:7px}
.cards tbody tr+tr td{border-top:0}
.cards td{display:flex;justify-content:space-between;gap:14px;padding:2px 0;text-align:right}
.cards td::before{content:attr(data-l);color:var(--soft);text-align:left;flex:none}
.plain{font-size:12px}.plain th,.plain td{padding-right:5px}.letters li{display:block}
.n+td:not(.n),.n+th:not(.n){padding-left:0}.tile:last-child{grid-column:span 2}
}
@media print{
:root{--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#ccc;--blue:#2458b0;--pale:#a9c4f0;--bad:#b02a1c;
--good:#1d6b40;
--warn:#8a5a00;--badbg:#fff;--goodbg:#fff;--warnbg:#fff}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{padding:0;max-width:none}section,.tile{break-inside:auto;border-color:#bbb}
figure,li,tr,.tiles,.pair>div{break-inside:avoid}h2,h3{break-after:avoid}details{display:none}
}
"""
