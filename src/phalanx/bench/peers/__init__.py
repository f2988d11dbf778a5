"""PyTorch's own parallelism, peer by peer, against Phalanx doing the same job: `phalanx bench peers`.

jobs      what is compared: shapes, and for every peer the mesh and arguments with which Phalanx does its job
frameworks  the peers' training steps, and the plain one
ours      Phalanx's training steps, on the transports and on none
audit     live bytes and messages of a step, counted alike on both sides
compare   ways alternated in one run, and the row that comes of it
session   one rank's whole run
report    table, plot and JSON
cuda      one GPU against eager PyTorch, FSDP2 and torch.compile: `python -m phalanx.bench.peers.cuda`
jax       the same step in JAX, in a process of its own
"""
