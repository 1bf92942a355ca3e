"""Pure numerical methods behind the policies: arrays in, positions out, no client ids.

========== =============================================================
module     what it does
========== =============================================================
dpp        exact k-DPP: draws, probabilities, inclusion (paper 4)
gp         low-rank covariance fit, greedy posterior selection (paper 3)
bandits    duels and Thompson sampling without replacement (paper 1)
sampling   inclusion probabilities, and samples that have them (several policies)
herding    the set whose merged reading is closest to a target (SketchMatch)
========== =============================================================
"""
