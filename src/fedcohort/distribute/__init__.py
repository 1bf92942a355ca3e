"""Work spread over a Ray cluster: comparisons, sweeps, sketches, and rounds too large for one.

Results equal those of one process. Ray is an extra of its own (``pip install 'fedcohort[ray]'``)
and is imported when a cluster is first used.
"""
