"""One file per figure or table of a paper: reads run folders, writes a picture and the numbers behind it.

    python -m analysis.report out/*                        all about the runs, on one page to open in a browser
    python -m analysis.loss_curves out/std_* out/sps_*     SPS paper, figure 2: loss over tokens and time
    python -m analysis.gradient_flow out/std out/sps       its figure 5a: where the gradient of later losses lands
    python -m analysis.restricted_state out/sps out/ds     its figure 5b: nats lost without the far state
    python -m analysis.context_ready out/cr_*              Context-Ready paper, tables 6, A7, A8: unrolls
    python -m analysis.scores out/chase_*                  its appendix B: a task's scores over steps
    python -m analysis.gpn_state out/gpn                   GPN paper, section 7: what state and memory hold

They write beside the runs, here to out/, or to where --out says.
"""
