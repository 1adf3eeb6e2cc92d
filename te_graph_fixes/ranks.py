"""The rank of this process in its job, as set by its launcher."""

from __future__ import annotations

import os

_RANKS = (
    "RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
)
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
"""The environment variables of launchers. torchrun's come first, because it may run inside a task of Slurm or MPI."""


def rank() -> str | None:
    """Return the rank of this process, or None without a launcher."""
    return _first_set(_RANKS)


def is_first_on_host() -> bool:
    """Return whether this process is the first rank of its host, or is started without a launcher."""
    return (_first_set(_LOCAL_RANKS) or rank()) in (None, "0")


def _first_set(names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := os.environ.get(name, "").strip())), None)
