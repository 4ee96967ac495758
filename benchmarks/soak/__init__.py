"""A soak test: random runs, each with one fault; what must come of it is decided before it starts.

    python -m benchmarks.soak --runs 200 --seed 1    # or scripts/soak
    python -m benchmarks.soak --run 17               # this one run again, with all that it printed
    python -m benchmarks.soak --runs 40 --stock      # the same faults under Lightning's own ddp: no judgement

=============== ============================================================================================
``plan``        draws a run from one integer: how the ranks are started, callbacks, fault
``rules``       what must come of a run: error of each rank, exit code, last line, seconds, checkpoint
``program``     the user's script that the ranks run; most faults happen in its hooks
``outside``     the faults that reach a run from outside: signals, Ctrl-C, a stranger's message
``run``         starts one run, lets the fault happen and notes what came of it
``outcome``     what came of a run, and where that differs from what must
``table``       the result by fault
``lost_ranks``  a program of its own: fits that go on when ranks are killed
=============== ============================================================================================

Time is injected: grace period, silence limit and heartbeats are a few seconds, so that no run takes long.
"""
