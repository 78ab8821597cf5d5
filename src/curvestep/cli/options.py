"""What each command can be told: one dataclass a command, one option a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

Figure = Literal["fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "fig8"]
Scale = Literal["laptop", "longer", "paper"]
Engine = Literal["joblib", "ray"]


@dataclass(kw_only=True)
class Reproduce:
    """Every figure and table of the paper, and one HTML report.

    Example: curvestep reproduce fig2 fig8 --folder reproduction
    """

    figures: Annotated[
        Positional[tuple[Figure, ...]], arg(help="fig1 to fig8; none: all", metavar="FIGURE")
    ] = ()
    folder: str = "reproduction"
    """Folder for runs, figures, claims.md and report.html."""
    scale: Scale = "laptop"
    """laptop: minutes on two cores; paper: days on a GPU."""
    engine: Engine = "joblib"
    """Processes here, or a Ray cluster."""
    workers: int = 2
    """Runs at a time."""
    address: str = ""
    """Of a Ray cluster, such as 10.0.0.1:6379; '' starts one here."""
    offline: bool = False
    """Use no network; stand-ins replace data that are not here."""
    quiet: bool = False
    """Show no progress."""
    no_open: bool = False
    """Do not show the report in a browser at the end."""


@dataclass(kw_only=True)
class Train:
    """Train one recipe and keep everything in a run folder.

    Example: curvestep train ptb-lstm --lr auto --max-norm auto
    """

    folder: str = ""
    """Run folder; '' is runs/<recipe>-<setting>."""
    scale: Scale = "laptop"
    """Which sizes the other defaults have."""
    resume: bool = False
    """Go on where the folder's checkpoint stands."""
    dry_run: bool = False
    """Only print what would run, and its cost in seconds."""
    devices: int = 1
    """Processes that share each batch."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several devices work together."""
    loggers: tuple[Literal["csv", "tensorboard"], ...] = ()
    """Besides the run's own files."""
    checkpoint_seconds: float = 60.0
    """Seconds between two checkpoints."""
    threads: int = 0
    """Torch threads of each process; 0: torch decides."""
    offline: bool = False
    """Use no network for the data."""
    quiet: bool = False
    """Show no progress."""


@dataclass(kw_only=True)
class Sweep:
    """Train one recipe at every point of a grid; give fields several values.

    Example: curvestep sweep ptb-lstm --lr 3 10 30 --max-norm inf 0.25
    """

    folder: str = ""
    """Folder of the sweep; '' is runs/sweep-<recipe>."""
    scale: Scale = "laptop"
    """Which sizes the other defaults have."""
    engine: Engine = "joblib"
    """Processes here, or a Ray cluster."""
    workers: int = 2
    """Trials at a time."""
    address: str = ""
    """Of a Ray cluster, such as 10.0.0.1:6379; '' starts one here."""
    checkpoint_seconds: float = 60.0
    """Seconds between two checkpoints of a trial."""
    offline: bool = False
    """Use no network for the data."""
    quiet: bool = False
    """Show no progress."""


@dataclass(kw_only=True)
class Report:
    """One self-contained HTML page about runs, sweeps, or traces of your own loop.

    Example: curvestep report runs/mine runs/other --output report.html
    """

    runs: Annotated[
        Positional[tuple[str, ...]], arg(help="run folders, folders of runs, trace files", metavar="RUN")
    ]
    output: str = "report.html"
    """HTML file to write."""
    title: str = ""
    """Heading of the page; '' is what was found."""
    figures: str = ""
    """Folder for each figure as PNG and SVG; '' writes none."""
    json: bool = False
    """Print the verdict as JSON instead of words."""
    open: bool = False
    """Open the page in a browser."""


@dataclass(kw_only=True)
class Advise:
    """What (L0, L1) a run saw, which lr and max_norm follow, and why.

    Example: curvestep advise runs/mine/trace.jsonl
    """

    traces: Annotated[
        Positional[tuple[str, ...]], arg(help="trace files or run folders, of one task", metavar="TRACE")
    ]
    json: bool = False
    """Print JSON instead of words."""


@dataclass(kw_only=True)
class Calibrate:
    """lr and max_norm for a recipe, measured before training from a few gradients.

    Example: curvestep calibrate ptb-lstm --batch-size 40
    """

    scale: Scale = "laptop"
    """Which sizes the other defaults have."""
    num_batches: int = 3
    """Batches to measure at least."""
    max_gradients: int = 40
    """Gradients to evaluate at most."""
    offline: bool = False
    """Use no network for the data."""
    json: bool = False
    """Print JSON instead of words."""


@dataclass(kw_only=True)
class Data:
    """Fetch data sets, verify them, and keep them in the cache.

    Example: curvestep data get ptb cifar10
    """

    names: Annotated[
        Positional[tuple[Literal["ptb", "cifar10"], ...]], arg(help="data sets; none: all", metavar="NAME")
    ] = ()
    offline: bool = False
    """Only check what is here already."""
    quiet: bool = False
    """Show no progress."""
