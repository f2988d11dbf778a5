"""The same safety for every c10d backend: what each rank called is in a file that outlives it, and a hang gets a verdict.

`ring` is that file and `board` the fingerprints by which ranks of one host notice at once that they disagree. `snapshot` reads
rings, `verdict` judges them, `monitor` decides when. `process_group` stands before Gloo, NCCL or any registered backend.
"""
