"""One file per figure or table of a paper: reads run folders, writes a figure and the numbers behind it.

    python -m analysis.report out/*                        runs on one page to open in a browser
    python -m analysis.loss_curves out/std_* out/sps_*     SPS paper, figure 2: loss over tokens, time and FLOPs
    python -m analysis.tokens_to_match out/std_* out/sps_* its figures 1 and 2: tokens until one has another's loss
    python -m analysis.scaling out/std_* out/sps_*         its figure 3: gains by size
    python -m analysis.window_sweep out/sps_w*             its figure 4: loss over the window
    python -m analysis.gradient_flow out/std out/sps       its figure 5a: where the gradient of later losses lands
    python -m analysis.restricted_state out/sps out/ds     its figure 5b: nats lost without the far state
    python -m analysis.seeds out/std_* out/sps_*           its appendix C: intervals and tests over seeds
    python -m analysis.tables out/std_* out/sps_*          its tables 2 and 3, the paper's rows below ours
    python -m analysis.context_ready out/cr_*              Context-Ready paper, tables 6, A7, A8: unrolls
    python -m analysis.scores out/chase_*                  its appendix B: a task's scores over steps
    python -m analysis.scores out/star_* --bars            NextLat paper, path-star: methods side by side
    python -m analysis.a5 out/a5_*                         its A5: accuracy on longer words
    python -m analysis.manhattan out/manhattan_*           its Manhattan: detours, compression, rank, the map
    python -m analysis.probes out/stories_*                its TinyStories: what states know of tokens to come
    python -m analysis.speculative out/fw_* --data=A,B     its speculative decoding: draft lengths, a table over texts
    python -m analysis.gpn_state out/gpn                   GPN paper, section 7: what state and memory hold
    python -m analysis.compare NAME:... NAME:...           any models, each at its best rate: trains its own runs
    python -m analysis.shootout                            all architectures at equal budgets: trains its own runs
    python -m analysis.claims                              claims of all papers in miniature: trains its own runs

They write beside the runs, here to out/, or to --out. figures.py has what they share: reading runs, statistics over
seeds, plots. edits.py has edited models to compare with.
"""
import sys

from common.start import quiet_start

if sys.argv[0] == '-m':  # as Python has it while it imports the package of `python -m analysis.NAME`
    quiet_start()
