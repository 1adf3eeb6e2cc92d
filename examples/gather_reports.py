"""Compare the statuses of the fixes on all ranks of a job, and stop the job if they differ.

    torchrun --nproc-per-node 8 examples/gather_reports.py

A training program calls `check_ranks` once, after ``init_process_group`` and after TransformerEngine (TE) was imported.
"""

import te_graph_fixes  # isort: skip

import sys

import torch.distributed as dist
import transformer_engine.pytorch  # noqa: F401


def check_ranks() -> dict[int, te_graph_fixes.Report]:
    """Gather the reports on every rank, and return those that differ from the report of rank 0, by rank."""
    reports: list[te_graph_fixes.Report] = [te_graph_fixes.report()] * dist.get_world_size()
    dist.all_gather_object(reports, te_graph_fixes.report())
    return {rank: report for rank, report in enumerate(reports) if report != reports[0]}


def main() -> int:
    dist.init_process_group("gloo")
    different = check_ranks()
    report = te_graph_fixes.report()
    if dist.get_rank() == 0:
        print(
            f"TransformerEngine {report.te_version}, {dist.get_world_size()} ranks, {len(different)} differ from rank 0"
        )
        for fix_id, status in report.fixes.items():
            print(f"  {fix_id:26} {status.status:14} {status.reason}")
            for rank, other in different.items():
                if other.fixes[fix_id] != status:
                    print(f"    rank {rank}: TE {other.te_version}, {other.fixes[fix_id].status}")
    dist.destroy_process_group()
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
