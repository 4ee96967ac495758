"""Random training programs on several ranks, each compared with a plain loop of torch on one process.

``program.py`` draws a program, and says what is refused; ``model.py`` is what it learns and in which order; ``fit.py``
runs it on ranks, under Lightning and a strategy of this package; ``judge.py`` trains by a plain loop and compares;
``run.py`` runs many programs in few groups of ranks, and makes one that fails small.

    scripts/same_numbers --runs 300 --seed 1        # 300 programs
    scripts/same_numbers --run 17 --shrink          # one of them, and the simplest that fails as it does
    scripts/same_numbers --program 'ranks=2 samples=5 order="cached"'
"""
