"""``pgreaper demo``: the first five minutes."""

import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import click

from pgreaper.cli.common import emit
from pgreaper.demo import Event, Kept, Plan, Report, Scene, WorkerScene, play
from pgreaper.render import console, is_terminal
from pgreaper.text import duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_TONES = {"plain": "", "bad": "red", "good": "green"}
_PICTURE_WIDTH = 88
_PROGRESS_EVERY = 1.0


@click.command()
@click.option("--keep", is_flag=True, help="Leave the server running; say how to connect and how to stop it.")
@click.option(
    "--holds", type=click.IntRange(1_000, 1_000_000), default=100_000, show_default=True, metavar="N",
    help="Overdue holds; a fifth as many lie ahead.",
)  # fmt: skip
@click.option("--svg", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
              help="Also draw the last screen into FILE.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the proof as one JSON document, and nothing else.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks and the server's own words.")
def demo(*, keep: bool, holds: int, svg: Path | None, as_json: bool) -> int:
    """
    Watch 100,000 holds expire on a throw-away PostgreSQL.

    Four workers expire the overdue bookings of a table while its application goes on
    selling; one worker is killed with a lease in hand. At the end the database itself
    is asked whether each hold was expired once. Takes about fifteen seconds; Ctrl-C at
    any time leaves nothing behind.

    Exit codes: 0 the proof holds; 1 it does not, or the demo failed.
    """
    plan = Plan(holds=holds)
    try:
        with _interruptible(), _view(as_json=as_json) as view:
            report = play(plan, view.watch, keep=keep)
    except _Interrupted as interrupted:
        click.echo("stopped; nothing is left behind", err=True)
        return 128 + interrupted.signal
    exit_code = 0 if report.holds else 1
    if as_json:
        _emit(report, exit_code)
    else:
        view.conclude(report)
    if svg is not None:
        _draw(report, svg)
    return exit_code


class _Interrupted(KeyboardInterrupt):
    """A signal says stop."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextmanager
def _interruptible() -> Iterator[None]:
    """
    Let the first SIGINT, SIGTERM or SIGHUP end the block; what comes later does not disturb the clearing up.

    A signal that is ignored stays ignored, as under nohup.
    """
    received = False

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        if not received:
            received = True
            raise _Interrupted(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
            before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        received = True
        for number, handler in before.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------------
# Three ways to look


class _View(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def watch(self, scene: Scene) -> None:
        """Show what is new."""

    def conclude(self, report: Report) -> None:
        """Show how it ended, after everything is over."""


def _view(*, as_json: bool) -> _View:
    if as_json:
        return _Nothing()
    return _Screen() if is_terminal() and not console().is_dumb_terminal else _Lines()


class _Nothing:
    """Nothing is shown."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def watch(self, scene: Scene) -> None:
        pass

    def conclude(self, report: Report) -> None:
        pass


class _Lines(_Nothing):
    """For a file or a pipe: one line per event, and one a second on how far things are."""

    def __init__(self) -> None:
        self._step: str | None = None
        self._told = 0
        self._progress_at = 0.0

    def watch(self, scene: Scene) -> None:
        if scene.step is not None and scene.step != self._step:
            self._step = scene.step
            click.echo(f"{scene.step} ...")
            return
        if scene.events and not self._told:
            for line in _premises(scene):
                click.echo(line)
            self._progress_at = time.monotonic()
        for event in scene.events[self._told :]:
            click.echo(f"{event.at:5.1f} s  {event.text}")
        self._told = len(scene.events)
        if scene.step is None and scene.remaining and time.monotonic() - self._progress_at >= _PROGRESS_EVERY:
            self._progress_at = time.monotonic()
            shares = "  ".join(f"{w.number}: {w.expired:,}" for w in scene.workers)
            click.echo(f"{scene.elapsed:5.1f} s  {scene.remaining:,} left, {scene.rate:,.0f}/s  (workers {shares})")

    def conclude(self, report: Report) -> None:
        click.echo(_served(report.scene))
        click.echo()
        for line in report.proof:
            click.echo(f"{'ok  ' if line.holds else 'FAIL'}  {line.claim}")
            click.echo(f"      {line.detail}")
        click.echo()
        for text in _outlook(report.queries, report.kept):
            click.echo(text)


class _Screen(_Nothing):
    """For a person: one picture that moves, then the proof below it."""

    def __init__(self) -> None:
        from rich.live import Live

        self._console = console()
        self._live: Live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def watch(self, scene: Scene) -> None:
        # One line less than there are: the cursor needs one.
        lines = shutil.get_terminal_size().lines - 1
        self._live.update(_stage(scene, self._console.width, lines), refresh=True)

    def conclude(self, report: Report) -> None:
        self._console.print(_proof(report))
        for text in _outlook(report.queries, report.kept):
            self._console.print(_text(text), soft_wrap=True)


# --------------------------------------------------------------------------
# What there is to say


def _premises(scene: Scene) -> list[str]:
    plan = scene.plan
    return [
        f"{plan.holds:,} bookings are overdue, {plan.ahead:,} are not. A lease lasts {duration(plan.lease)}.",
        f"So that you see something: batches of {plan.batch}, and a rate limit of {plan.rate:,}/s.",
    ]


def _served(scene: Scene) -> str:
    a = scene.application
    return (
        f"application: {a.paid:,} paid, {a.extended:,} extended, {a.late:,} too late;"
        f" waits {duration(a.typical)}, at most {duration(a.longest)}"
    )


def _outlook(queries: Sequence[str], kept: Kept | None) -> list[str]:
    """What to try next, unwrapped: it is meant for copying."""
    if kept is None:
        return ["Three queries to try, after pgreaper demo --keep:", *(f"  {query}" for query in queries)]
    return [
        "Three queries to try:",
        *(f"  {query}" for query in queries),
        "The server goes on. Connect:",
        *([f"  {kept.psql}"] if kept.psql else []),
        f"  export PGREAPER_DATABASE_URL='{kept.url}'; pgreaper status",
        "Stop it, and remove its folder:",
        f"  {kept.stop}",
    ]


def _emit(report: Report, exit_code: int) -> None:
    scene = report.scene
    emit(
        "demo",
        exit_code=exit_code,
        holds=report.holds,
        server_version=scene.server,
        plan={
            "holds": scene.plan.holds,
            "ahead": scene.plan.ahead,
            "workers": scene.plan.workers,
            "batch": scene.plan.batch,
            "rate_limit": scene.plan.rate,
            "lease_seconds": scene.plan.lease,
        },
        seconds=round(scene.elapsed, 3),
        workers=[{"worker": w.number, "name": w.name, "expired": w.expired, "killed": w.killed} for w in scene.workers],
        application={
            "paid": scene.application.paid,
            "extended": scene.application.extended,
            "late": scene.application.late,
            "median_wait_seconds": round(scene.application.typical, 6),
            "longest_wait_seconds": round(scene.application.longest, 6),
        },
        events=[{"at_seconds": round(event.at, 3), "text": event.text} for event in scene.events],
        proof=[
            {
                "name": line.name,
                "claim": line.claim,
                "holds": line.holds,
                "detail": line.detail,
                "numbers": line.numbers,
            }
            for line in report.proof
        ],
        queries=list(report.queries),
        kept=asdict(report.kept) if report.kept else None,
    )


# --------------------------------------------------------------------------
# How rich draws it


def _text(text: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(text, style=style)


def _stage(scene: Scene, width: int, lines: int) -> "RenderableType":
    """The moving picture, in as many lines as there are."""
    from rich.console import Group
    from rich.padding import Padding

    title = _text("pgreaper demo", "bold")
    if scene.server:
        title.append(f"  on a throw-away PostgreSQL {scene.server}", style="not bold dim")
    if not scene.workers:
        return Padding(Group(title, _text(""), _text(f"{scene.step} …", "dim")), (1, 1, 0, 1))

    parts: list[RenderableType] = [
        title,
        *(_text(line, "dim") for line in _premises(scene)),
        _text(""),
        _crew(scene),
        _text(""),
        _text(_served(scene), "cyan"),
        _text(""),
        _progress(scene, width - 2),
        _text(""),
    ]
    room = max(lines - 18, 1)
    parts += [_told(event) for event in scene.events[-room:]]
    if scene.step is not None:
        parts.append(_text(f"         {scene.step} …", "dim"))
    return Padding(Group(*parts), (1, 1, 0, 1))


def _told(event: Event) -> "Text":
    line = _text(f"{event.at:5.1f} s  ", "dim")
    line.append(event.text, style=f"not dim {_TONES[event.tone]}")
    return line


def _crew(scene: Scene) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
    table.add_column("worker", min_width=9)
    table.add_column("pid", justify="right", min_width=8)
    table.add_column("expired", justify="right", min_width=9)
    table.add_column("per second", justify="right", min_width=11)
    table.add_column("leased", justify="right", min_width=7)
    table.add_column("lease ends in", justify="right", min_width=13)
    for worker in scene.workers:
        table.add_row(*_row(worker), style="red" if worker.killed else "")
    return table


def _row(worker: WorkerScene) -> list[str]:
    if worker.killed:
        left = worker.lease_left
        state = "taken back" if left is None else f"{max(left, 0):.1f} s"
        return [f"{worker.number} killed", str(worker.pid), f"{worker.expired:,}", "", f"{worker.leased:,}", state]
    leased = f"{worker.leased:,}" if worker.leased else "·"
    return [str(worker.number), str(worker.pid), f"{worker.expired:,}", f"{worker.rate:,.0f}", leased, ""]


def _progress(scene: Scene, width: int) -> "Table":
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    facts = f"{scene.remaining:,} left  {scene.rate:,.0f}/s  {scene.elapsed:.1f} s"
    done = scene.plan.holds - scene.remaining
    table = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(
        total=scene.plan.holds,
        completed=done,
        width=max(width - 36, 10),
        complete_style="green",
        finished_style="green",
    )
    table.add_row(bar, _text(facts, "bold"))
    return table


def _proof(report: Report) -> "RenderableType":
    from rich.padding import Padding
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column()
    for line in report.proof:
        table.add_row(_text("✓", "bold green") if line.holds else _text("✗", "bold red"), _text(line.claim, "bold"))
        table.add_row("", _text(line.detail, "dim" if line.holds else "red"))
    return Padding(table, (1, 1))


def _draw(report: Report, path: Path) -> None:
    """Draw the last screen as an SVG."""
    import io

    from rich.console import Console

    paper: Console = Console(
        record=True,
        file=io.StringIO(),
        width=_PICTURE_WIDTH,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        legacy_windows=False,
    )
    paper.print(_stage(report.scene, _PICTURE_WIDTH, 40))
    paper.print(_proof(report))
    path.write_text(paper.export_svg(title="pgreaper demo", unique_id="pgreaper-demo"), encoding="utf-8")
