"""Run one training with several settings, and compare the losses and norms that the runs print.

`megatron_lm.py`, `megatron_bridge.py` and `megatron_options.py` share this module.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OFF, ORIGINAL, FIXED = SETTINGS = ("graphs off", "TE's graphs", "with te-graph-fixes")
CHECKED = {"TE's graphs, checked": ORIGINAL, "with te-graph-fixes, checked": FIXED}
"""The setting of each run under `te-graph-fixes run --check`, and the setting of the same run without the check."""
WARMUP = 3
"""The number of steps before the capture, which is Megatron's default."""
TIMED_OUT = 124
FOLDER = "FOLDER"
"""A placeholder for the folder of a run in the arguments of its program."""
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MAMBA_DETERMINISTIC": "1",
    "OMP_NUM_THREADS": "4",
}
KINDS = {
    "experts": r"mlp\.experts\.",
    "router": r"\.router\.",
    "shared expert": r"shared_expert",
    "Mamba mixer": r"\.mixer\.",
    "attention": r"attention",
    "embedding": r"embedding|output_layer",
    "MLP": r"\.mlp\.",
    "other": r"",
}


@dataclass(frozen=True)
class Training:
    """A program that prints Megatron's log lines, with its arguments, and with the arguments that turn graphs on."""

    name: str
    program: Sequence[str]
    graphs: Sequence[str]
    folder: Path
    gpus: int = 2
    working_folder: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    stages: Sequence[Sequence[str]] = ((),)
    """The additional arguments of each stage. The program runs once for each stage."""

    def command(self, setting: str) -> list[str]:
        """Return the command of a run with the ``setting``."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        runner: list[str] = []
        if CHECKED.get(setting, setting) == FIXED or setting in CHECKED:
            check = ["--check"] if setting in CHECKED else []
            runner = [sys.executable, "-m", "te_graph_fixes", "run", *check, "--"]
        graphs = [] if setting == OFF else self.graphs
        folder = str(self.folder_of(setting))
        commands = [
            [word.replace(FOLDER, folder) for word in (*runner, *torchrun, *self.program, *graphs, *stage)]
            for stage in self.stages
        ]
        if len(commands) == 1:
            return commands[0]
        return ["sh", "-c", " && ".join(map(shlex.join, commands))]

    def folder_of(self, setting: str) -> Path:
        return self.folder / re.sub(r"\W+", "-", setting.replace("'", ""))

    def log_of(self, setting: str) -> Path:
        return self.folder_of(setting).with_suffix(".log")

    def start(self, setting: str) -> subprocess.Popen[bytes]:
        """Start a run with the ``setting`` in its own process group, and return its process."""
        self.folder_of(setting).mkdir(parents=True, exist_ok=True)
        fixes = "on" if CHECKED.get(setting, setting) == FIXED else "off"
        with open(self.log_of(setting), "wb") as log:
            return subprocess.Popen(
                self.command(setting),
                cwd=self.working_folder,
                env={**DETERMINISTIC, **self.environment, **os.environ, "TE_GRAPH_FIXES": fixes},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@dataclass
class Run:
    """The values and messages in the log of one run."""

    figures: dict[str, list[str]] = field(default_factory=dict)
    """The printed values of each quantity, as texts in the order of the log."""
    error: str = ""
    peak_mib: list[float] = field(default_factory=list)
    norms: dict[str, dict[str, float]] = field(default_factory=dict)
    """Norms of `main_grad`, by step and parameter."""
    check: list[str] = field(default_factory=list)
    """The lines that `run --check` printed."""
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, log: str, status: int) -> Run:
        """Return the run in a log of Megatron-LM or Megatron-Bridge. ``status`` is the exit status of the run."""
        run = cls()
        for line in log.splitlines():
            if re.search(r"\biteration\s+\d+/", line):
                for name, text in re.findall(r"\| *([a-zA-Z][^|:]*?) *: *([^| ]+) *(?=\|)", line):
                    run.figures.setdefault(name, []).append(text)
            elif "validation loss at" in line:
                for text in re.findall(r"\| *lm loss value: *(\S+)", line):
                    run.figures.setdefault("validation loss", []).append(text)
            elif found := re.match(r"(versions|gradient norms of step (\d+)): (\{.*\})$", line):
                values = json.loads(found[3])
                if found[2]:
                    run.norms[found[2]] = values
                else:
                    run.versions = values
            elif "te-graph-fixes check" in line:
                run.check.append(line.partition("te-graph-fixes check")[2].lstrip(":, ").strip())
        run.peak_mib = [float(mib) for mib in re.findall(r"peak memory of rank \d+: (\S+) MiB", log)]
        if status == TIMED_OUT:
            run.error = "took longer than --timeout"
        elif status:
            errors = re.findall(r"^(?:\[rank\d+\]:? *)?((?:[\w.]*(?:Error|Exception)): .*)", log, re.MULTILINE)
            run.error = f"ended with status {status}: {errors[0] if errors else log[-200:].strip() or 'no output'}"
        return run

    def texts(self) -> dict[str, dict[str, str]]:
        """Return the printed losses and norms by quantity, each as a dict of texts by step or parameter."""
        texts = {
            name: {str(i): text for i, text in enumerate(texts)}
            for name, texts in self.figures.items()
            if name.endswith(("loss", "norm"))
        }
        for step, norms in self.norms.items():
            in_step = {f"{step} {name}": repr(norm) for name, norm in norms.items()}
            texts.setdefault("norms of main_grad", {}).update(in_step)
        return texts

    def times(self) -> list[float]:
        """Return the milliseconds of each step from the third replayed step on, or [] if the log has no times."""
        return [float(text) for text in self.figures.get("elapsed time per iteration (ms)", [])][WARMUP + 2 :]

    def means(self, step: str) -> dict[str, float]:
        """Return the mean norm of `main_grad` in ``step`` for each kind of parameter, or {} if the log has no norms."""
        by_kind: dict[str, list[float]] = {}
        for name, norm in self.norms.get(step, {}).items():
            kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))
            by_kind.setdefault(kind, []).append(norm)
        return {kind: statistics.mean(by_kind[kind]) for kind in KINDS if kind in by_kind}


def run_all(jobs: Iterable[tuple[Training, str]], at_once: int, timeout: float) -> dict[tuple[str, str], Run]:
    """Run each training with its setting, `at_once` at a time, and return the finished runs by name and setting.

    After an interrupt, end the runs in progress, and return only the finished runs.
    """
    waiting = list(jobs)
    running: list[tuple[Training, str, subprocess.Popen[bytes], float]] = []
    runs = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                training, setting = waiting.pop(0)
                running.append((training, setting, training.start(setting), time.monotonic() + timeout))
            time.sleep(0.1)
            for job in [*running]:
                training, setting, process, deadline = job
                if process.poll() is None and time.monotonic() < deadline:
                    continue
                status = end(process)
                running.remove(job)
                runs[training.name, setting] = run = Run.read(
                    training.log_of(setting).read_text(errors="replace"), status
                )
                if run.error:
                    log = training.log_of(setting)
                    print(f"{training.name}, {setting}: {run.error} ({log})", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: {len(waiting) + len(running)} runs did not finish", file=sys.stderr, flush=True)
    finally:
        for _, _, process, _ in running:
            terminate(process)
        for _, _, process, _ in running:
            end(process)
    return runs


def end(process: subprocess.Popen[bytes]) -> int:
    """End a run if it is still running. Return its exit status, or `TIMED_OUT` if it had to be ended.

    The ranks are in process groups of their own, so torchrun must end them, which takes up to 30 seconds.
    """
    if process.poll() is not None:
        return process.returncode
    terminate(process)
    try:
        process.wait(45)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return TIMED_OUT


def terminate(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def run_and_report(training: Training, options: argparse.Namespace) -> int:
    """Run all settings, print their tables, draw a picture, and return the exit status."""
    settings = [*SETTINGS, *(CHECKED if options.check else ())]
    for setting in settings:
        print(f"{setting}: {shlex.join(training.command(setting))}", flush=True)
    jobs = [(training, setting) for setting in settings]
    found = run_all(jobs, len(jobs) if options.at_once else 1, options.timeout)
    if len(found) < len(jobs):  # after an interrupt
        return 1
    runs = {setting: found[training.name, setting] for setting in settings}
    (training.folder / "runs.json").write_text(json.dumps({name: asdict(run) for name, run in runs.items()}))
    unchecked = {setting: runs[setting] for setting in SETTINGS}
    print(figures_table(unchecked))
    if runs[OFF].norms:
        print("mean norm of main_grad by kind of parameter:", norms_table(unchecked), sep="\n")
    print(costs(runs, options.at_once))
    draw(training.folder / "megatron.png", *panels(options.title or training.name, runs))
    return compare(runs, training.folder)


def add_arguments(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add the command-line arguments that `run_and_report` reads. ``folder`` is the default of ``--out``."""
    parser.add_argument("--check", action="store_true", help="add two runs under `te-graph-fixes run --check`")
    parser.add_argument("--gpus", type=int, default=2, help="the number of GPUs; default: %(default)s")
    parser.add_argument("--iterations", type=iterations, default=14, help="steps of a run; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path(folder), help="folder of logs; default: %(default)s")
    parser.add_argument("--title", default="", help="the title of the picture")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per run; default: %(default)s")
    parser.add_argument("--at-once", action="store_true", help="run all settings at the same time, and print no times")


def iterations(text: str) -> int:
    """Return the value of ``--iterations``. Raise ArgumentTypeError if graphs would be captured too late."""
    steps, least = int(text), WARMUP + 2
    if steps < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, because graphs are captured after {WARMUP} steps")
    return steps


def load(path: Path) -> dict[str, Run]:
    return {setting: Run(**run) for setting, run in json.loads(path.read_text()).items()}


def count_differences(run: Run, reference: Run) -> dict[str, tuple[int, int]]:
    """Return, by quantity, how many values of ``run`` differ from the ``reference``, and how many the reference has."""
    found, wanted = run.texts(), reference.texts()
    different: dict[str, tuple[int, int]] = {}
    for name, values in wanted.items():
        others = found.get(name, {})
        count = sum(values.get(key) != others.get(key) for key in values.keys() | others.keys())
        different[name] = (count, len(values))
    return different


def differences(run: Run, reference: Run) -> str:
    """Return a text with the number of differing values of each quantity, or "" if all values are equal."""
    parts = [
        f"{name} {count} of {total}" for name, (count, total) in count_differences(run, reference).items() if count
    ]
    return f"differ: {', '.join(parts)}" if parts else ""


def compare(runs: Mapping[str, Run], folder: Path) -> int:
    """Print whether the runs agree, and return the exit status of the program (see `megatron_lm`)."""
    reference = runs[OFF]
    if reference.error or not reference.figures.get("lm loss"):
        print(f"cannot compare: the run without graphs {reference.error or 'printed no loss'} (logs: {folder})")
        return 2
    answers = {name: run.error or differences(run, reference) for name, run in runs.items() if name in SETTINGS[1:]}
    for setting, answer in answers.items():
        print(f"{setting} against graphs off: {answer or 'the same in every digit'}")
    good = not answers[FIXED]
    for setting, unchecked in CHECKED.items():
        if setting in runs:
            run = runs[setting]
            changed = run.error or differences(run, runs[unchecked])
            print(f"{setting} against {unchecked}: {changed or 'the same in every digit'}")
            print(*(f"  {line}" for line in run.check), sep="\n")
            good = good and not changed and (unchecked != FIXED or tensors_equal(run) > 0)
    return int(not good)


def tensors_equal(run: Run) -> int:
    """Return the number of tensors that the check compared, or 0 if it has not passed (docs/check.md).

    Ignore results with 0 steps, because processes that a rank starts, such as writers of checkpoints, print them.
    """
    results = [line for line in run.check if re.match(r"fixes [^:]*: [1-9]\d* steps?, ", line)]
    if not all(re.search("all equal(?!.* (left out|not reached))", line) for line in results):
        return 0
    return sum(int(re.findall(r"([\d,]+) tensors", line)[0].replace(",", "")) for line in results)


def figures_table(runs: Mapping[str, Run]) -> str:
    """Return a Markdown table of the loss and gradient norm by step. Values that differ from graphs off are bold."""
    names = [name for name in ("lm loss", "grad norm") if any(name in run.figures for run in runs.values())]
    rows = [["iteration", *(f"{name}, {setting}" for name in names for setting in runs)]]
    for i in range(max(len(run.figures.get("lm loss", [])) for run in runs.values())):
        row = [str(i + 1)]
        for name in names:
            texts = [run.figures.get(name, [])[i : i + 1] for run in runs.values()]
            row += ["".join(text) if text == texts[0] else f"**{''.join(text) or 'ended'}**" for text in texts]
        rows.append(row)
    return markdown(rows)


def norms_table(runs: Mapping[str, Run]) -> str:
    """Return a Markdown table of mean `main_grad` norms by kind of parameter, bold if they differ from graphs off."""
    rows = [["step", "parameters", *runs, "TE's graphs / graphs off"]]
    for step in runs[OFF].norms:
        means = {setting: run.means(step) for setting, run in runs.items()}
        for kind, wanted in means[OFF].items():
            values = [mean.get(kind) for mean in means.values()]
            found = means.get(ORIGINAL, {}).get(kind)
            texts = ["-" if value is None else f"{value:.5g}" for value in values]
            texts = [text if value == wanted else f"**{text}**" for text, value in zip(texts, values, strict=True)]
            rows.append([step, kind, *texts, f"{found / wanted:.3f}" if found and wanted else "-"])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. The first row is the header."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def costs(runs: Mapping[str, Run], at_once: bool) -> str:
    """Return, for each run, a line with the peak memory and, unless runs shared the GPUs, the time of a step."""
    lines = []
    for setting, run in runs.items():
        times = run.times()
        time = f"{statistics.median(times):.1f} ms a step (median of {len(times)})" if times and not at_once else ""
        memory = f"peak memory {max(run.peak_mib):.0f} MiB" if run.peak_mib else ""
        lines.append(f"{setting}: {', '.join(filter(None, [time, memory, run.error]))}")
    return "\n".join(lines)


Panel = Callable[[Any], None]


def panels(title: str, runs: Mapping[str, Run]) -> list[Panel]:
    """Return the two panels of the picture of one training."""
    if is_hybrid(runs):
        return [over_steps(title, "grad norm", runs), by_kind("by kind of parameter", runs)]
    return [over_steps(title, "grad norm", runs), over_steps("loss", "lm loss", runs)]


def is_hybrid(runs: Mapping[str, Run]) -> bool:
    """Return whether the runs with graphs off and with TE's graphs printed norms of Mamba layers."""
    return all("Mamba mixer" in runs[setting].means(str(WARMUP + 1)) for setting in (OFF, ORIGINAL))


LOOKS: dict[str, dict[str, Any]] = {
    OFF: {"color": "0.65", "linewidth": 9, "solid_capstyle": "round"},
    ORIGINAL: {"color": "tab:red", "linewidth": 3, "marker": "o", "markersize": 8},
    FIXED: {"color": "black", "linewidth": 3, "linestyle": (0, (2, 1.5))},
}


def draw(png: Path, *panels: Panel) -> None:
    """Draw the panels next to each other into a PNG file, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 15, "axes.spines.top": False, "axes.spines.right": False})
    figure, row = pyplot.subplots(1, len(panels), figsize=(13, 4.6), squeeze=False, constrained_layout=True)
    for axes, panel in zip(row[0], panels, strict=True):
        panel(axes)
    handles, labels = row[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(png, dpi=80)
    print(f"picture: {png}")


def over_steps(title: str, quantity: str, runs: Mapping[str, Run]) -> Panel:
    """Return a panel with a curve of ``quantity`` for each setting, from the first replayed step on."""

    def panel(axes: Any) -> None:
        for setting, look in LOOKS.items():
            values = [float(text) for text in runs[setting].figures.get(quantity, [])]
            label = f"{setting} (ended with an error)" if runs[setting].error else setting
            axes.plot(range(WARMUP + 1, len(values) + 1), values[WARMUP:], label=label, **look)
        axes.set(title=title, xlabel="step", ylabel={"grad norm": "gradient norm", "lm loss": "loss"}[quantity])
        axes.set_ylim(bottom=0 if quantity == "grad norm" else None)
        axes.xaxis.get_major_locator().set_params(integer=True)

    return panel


def by_kind(title: str, runs: Mapping[str, Run]) -> Panel:
    """Return a panel of the mean norms of `main_grad` in the first replayed step, relative to graphs off."""

    def panel(axes: Any) -> None:
        step = str(WARMUP + 1)
        wanted = {kind: norm for kind, norm in runs[OFF].means(step).items() if norm}
        for number, setting in enumerate(SETTINGS):
            means = runs[setting].means(step)
            places = [place + 0.27 * (number - 1) for place in range(len(wanted))]
            ratios = [means.get(kind, 0) / wanted[kind] for kind in wanted]
            axes.barh(places, ratios, height=0.25, color=LOOKS[setting]["color"], label=setting)
        axes.set(title=title, xlabel=f"norm of main_grad in step {step} / graphs off")
        axes.set_yticks(range(len(wanted)), wanted)
        axes.invert_yaxis()

    return panel
