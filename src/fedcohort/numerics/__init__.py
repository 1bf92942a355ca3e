"""Pure numerical methods behind the policies: arrays in, positions out, no client ids.

========== =============================================================
module     what it does
========== =============================================================
dpp        exact k-DPP: draws, probabilities, inclusion (paper 4)
gp         low-rank covariance fit, greedy posterior selection (paper 3)
bandits    duels and Thompson sampling without replacement (paper 1)
facility   facility location by lazy and stochastic greedy (DivFL)
herding    the set whose merged reading is closest to a target (SketchMatch)
========== =============================================================
"""
