"""`allranks doctor`: what is on this machine, and how fast it really is."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from allranks.cli.output import print_error, print_json, stdout_kept_free
from allranks.cluster import Cluster
from allranks.errors import ConfigError, ProcessError
from allranks.units import format_bytes, format_count, format_seconds
from allranks.verdict import Verdict

UNDETERMINED = 3
DEVICES = ("auto", "cpu", "cuda")


def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine and write it as a cluster file.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Processes; not given: one a GPU, or one a core without any.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write; not given: where `--cluster local` looks.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="|".join(DEVICES), help="What to measure.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, sizes and rounds: within a minute.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """What is on this machine; with --calibrate, how fast it computes, moves memory and communicates.

    Exit code 3: it could not be measured.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: expected one of {', '.join(DEVICES)}")
    if not calibrate:
        if given := [name for name, value in (("--nproc", nproc), ("--output", output), ("--quick", quick)) if value]:
            raise ConfigError(f"{given[0]} says how to measure: add --calibrate")
        return _describe(device, json=json)
    if output is not None and output.suffix != ".toml":
        named = output.with_suffix(".toml") if output.name else output / "cluster.toml"
        raise ConfigError(f"--output {output}: a cluster file ends in .toml: {named}")
    return _calibrate(device, nproc, output, quick=quick, json=json)


def _describe(device: str, *, json: bool) -> int:
    """What this machine is: one verdict, which judges nothing yet. ConfigError: there is no CUDA device to describe."""
    with stdout_kept_free(json):
        import torch
        import torch.distributed as dist

        from allranks.cli.calibration import NO_GPU
        from allranks.planning.this_machine import calibrated_files, look

        facts, measured = look(), [str(path) for path in calibrated_files()]
        gpus = _names_of_gpus(needed=device != "cpu")
    if device == "cuda" and not gpus:
        raise ConfigError(NO_GPU)
    backends = [name for name in ("nccl", "gloo", "mpi") if getattr(dist, f"is_{name}_available")()]
    used = "cuda" if gpus and device != "cpu" else "cpu"
    verdict = Verdict(
        "machine",
        f"{facts.processor}, {facts.cores} cores, {format_bytes(facts.memory_bytes)};"
        f" {', '.join(gpus) or 'no GPU that torch sees'}; a run takes {used}",
        (
            f"torch {torch.__version__}, backends {', '.join(backends)}",
            f"measured: {', '.join(measured) or 'nothing yet'}",
            "whether this machine is fit to train on is not judged yet, nor are other nodes looked at",
        ),
        "allranks doctor --calibrate measures how fast it is",
    )
    if not json:
        print(verdict)
        return 0
    facts_told = {"processor": facts.processor, "cores": facts.cores, "memory_bytes": facts.memory_bytes, "gpus": gpus}
    about = {"torch": torch.__version__, "backends": backends, "device": used, "calibrated": measured}
    print_json({**facts_told, **about, "verdict": verdict.to_json()})
    return 0


def _names_of_gpus(*, needed: bool) -> list[str]:
    """As torch names them. Raises ConfigError where it cannot use them and they are `needed`."""
    import torch

    from allranks.parallel.backend import cuda_explained

    count = torch.cuda.device_count()
    try:
        with cuda_explained():
            return [torch.cuda.get_device_name(index) for index in range(count)]
    except ConfigError:
        if needed:
            raise
        return ["a GPU that torch cannot use"] * count


def _calibrate(device: str, nproc: int | None, output: Path | None, *, quick: bool, json: bool) -> int:
    failure: ProcessError | None = None
    with stdout_kept_free(json):
        from allranks.cli.calibration import choose_start, cluster_words, finish_cluster, measure_here
        from allranks.planning.cluster_file import preflight, write_cluster
        from allranks.surviving.launch import launch

        begun = choose_start(device, nproc, output)
        preflight(begun.path)
        print(f"measuring {begun.nproc} x {begun.cluster.device.label} ...", file=sys.stderr)
        try:
            found = launch(measure_here, begun.device, quick, nproc=begun.nproc)
        except ProcessError as error:
            failure = error
        except RuntimeError as error:  # of a process: torch's own, with its rank's traceback as the cause
            failure = ProcessError(f"this machine could not be measured: {str(error).strip().splitlines()[0]}")
        if failure is None:
            cluster = replace(finish_cluster(begun, found, quick=quick), storage_bandwidth=_storage(quick, begun.nproc))
            write_cluster(cluster, begun.path)
    if failure is not None:
        return print_error(failure, json=json, exit_code=UNDETERMINED)
    if json:
        from dataclasses import asdict

        print_json({"file": str(begun.path), "quick": quick, "cluster": asdict(cluster)})
    else:
        print_cluster(cluster)
        words = cluster_words(begun, output)
        where = "allranks plan finds it as" if words == "local" else "use it as"
        print(f"wrote {begun.path}; {where} --cluster {words}")
    return 0


def _storage(quick: bool, nproc: int) -> float | None:
    """Bytes/s of the working directory, where runs keep their checkpoints, with `nproc` processes that write."""
    from allranks.profiling.calibrate import tidy
    from allranks.profiling.storage_rate import NUM_BYTES, QUICK_NUM_BYTES, measure_storage

    rate = measure_storage(Path.cwd(), QUICK_NUM_BYTES if quick else NUM_BYTES, nproc)
    return None if rate is None else tidy(rate)


def print_cluster(cluster: Cluster) -> None:
    """The measured figures: products by shape, memory and update, collectives of each group; within 100 columns."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, width=100, highlight=False)
    device, link = cluster.device, cluster.inside
    precisions = list(device.matmul_shapes)
    products = Table("rows x inner x columns", *(f"{name} FLOP/s" for name in precisions), box=None, pad_edge=False)
    rates = {name: {(m, k, n): rate for m, k, n, rate in rows} for name, rows in device.matmul_shapes.items()}
    for shape in dict.fromkeys(shape for rows in rates.values() for shape in rows):
        cells = [format_count(rates[name][shape]) if shape in rates[name] else "-" for name in precisions]
        products.add_row(" x ".join(map(str, shape)), *cells)
    console.print(products)
    assert device.kernel_seconds is not None and device.update_rate is not None
    console.print(
        f"memory {format_bytes(device.memory_bandwidth)}/s, a kernel at least {device.kernel_seconds * 1e6:.1f} us,"
        f" AdamW {format_count(device.update_rate)} parameters/s\n"
    )
    if cluster.storage_bandwidth is not None:
        console.print(f"the working directory takes {format_bytes(cluster.storage_bandwidth)}/s of a checkpoint\n")
    fixed = {name.replace("_", " "): seconds for name, seconds in asdict(device.fixed).items() if seconds}
    if fixed:
        told = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in fixed.items())
        console.print(f"besides kernels and bytes, however small tensors are: {told}\n")
    for size in sorted({size for sizes in link.measured.values() for size in sizes}):
        names = [name for name, sizes in link.measured.items() if size in sizes]
        table = Table(f"groups of {size}", *names, box=None, pad_edge=False)
        times = {name: {round(count): time for count, time in link.measured[name][size]} for name in names}
        for count in sorted({count for rows in times.values() for count in rows}):
            cells = [format_seconds(times[name][count]) if count in times[name] else "-" for name in names]
            table.add_row(format_bytes(count), *cells)
        console.print(table)
    if link.measured:
        console.print(f"a device sends at most {format_bytes(link.bandwidth)}/s to its neighbours\n")
