"""One file per figure or table of a paper: reads run folders, writes a picture and the numbers behind it.

    python -m analysis.loss_curves out/std_* out/sps_* --out=curves   SPS paper, figure 2: loss over tokens and time
    python -m analysis.context_ready out/cr_* --out=depths            Context-Ready paper, tables 6, A7, A8: unrolls
    python -m analysis.scores out/chase_* --out=wave                  its appendix B: a task's scores over steps
    python -m analysis.gpn_state out/gpn --out=state                  GPN paper, section 7: what state and memory hold
"""
import csv


def write_csv(path, rows: list[dict]) -> None:
    """Writes rows, dicts with the same keys."""
    with open(path, 'w', newline='') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
