"""The rank of this process in its job, as set by its launcher."""

import os
from collections.abc import Iterable

_RANKS = {
    "RANK": "LOCAL_RANK",
    "SLURM_PROCID": "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK": "MPI_LOCALRANKID",
    "PMIX_RANK": "",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_RANKID": "PALS_LOCAL_RANKID",
    "FLUX_TASK_RANK": "FLUX_TASK_LOCAL_ID",
}
"""The environment variables of launchers for the rank in the job, and for the rank on the host ("" if there is none).

The variables of torchrun come first, because torchrun may run inside a task of Slurm or MPI.
"""


def rank() -> str | None:
    """Return the rank of this process, or None without a launcher."""
    return _first_set(_RANKS)


def is_first_on_host() -> bool:
    """Return whether this process has no launcher, or is rank 0 of its host (of its job, if that rank is not set)."""
    return (_first_set(_RANKS.values()) or rank()) in (None, "0")


def _first_set(names: Iterable[str]) -> str | None:
    return next((value for name in names if (value := os.environ.get(name, "").strip())), None)
